/* What the guest of the workload `compile` compiles: functions that the optimiser has work with, a second of it under TCG.
 * SEED makes each run different. */
#ifndef SEED
#define SEED 1
#endif

typedef unsigned long word;

struct node {
    struct node *next;
    word key, values[7];
};

extern word consume(word);

#define FUNCTION(n)                                                                                                     \
    static word hash_##n(word x) {                                                                                      \
        for (int i = 0; i < 5; i++)                                                                                     \
            x = (x ^ (x >> (3 + (n) % 13))) * (0x9e3779b97f4a7c15UL + 2 * (n) + SEED);                                  \
        return x;                                                                                                       \
    }                                                                                                                   \
    word walk_##n(struct node *node, word limit) {                                                                      \
        word sum = SEED;                                                                                                \
        for (; node; node = node->next) {                                                                               \
            switch (node->key % 7) {                                                                                    \
            case 0: sum += hash_##n(node->values[0]); break;                                                            \
            case 1: sum -= hash_##n(node->values[1] + sum); break;                                                      \
            case 2: sum ^= node->values[2] * (n); break;                                                                \
            case 3: for (word i = 0; i < limit % 64; i++) node->values[i % 7] += hash_##n(i); break;                    \
            case 4: sum = consume(sum) + node->values[4]; break;                                                        \
            default: sum += hash_##n(sum ^ node->key);                                                                  \
            }                                                                                                           \
        }                                                                                                               \
        return sum;                                                                                                     \
    }

FUNCTION(1) FUNCTION(2) FUNCTION(3) FUNCTION(4)
