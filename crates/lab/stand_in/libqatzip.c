// A stand-in for libqatzip.so.3, for machines without QAT: the same functions, zlib inside, and a switch for everything
// that can go wrong. It prints nothing. Where it does as the real one does, that is QATzip 1.3.1. Compiled by lab's
// module `stand_in`.
//
// Every switch and every counter is a number with a name, see NUMBERS. A number's first value comes from the
// environment variable STAND_IN_<name> when the library is loaded; stand_in_set and stand_in_get change and read it
// from then on. Naming a number that does not exist aborts.
//
// The harm to qzCompress (its code, lengths and bytes) is done by every call, unless qzCompress_first says that only
// the first so many do it, or qzCompress_every that only each so-many-th does; the same for qzDecompress.

#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <zlib.h>

#define NUMBERS(X)                                                                                                     \
    /* Switches: what a session finds, and what the functions return. */                                               \
    X(hw_session_stat)                                                                                                 \
    X(qzInit_code) X(qzGetDefaultsDeflate_code) X(qzSetupSessionDeflate_code)                                          \
    X(bound)           /* what qzMaxCompressedLength says, unless 0 */                                                 \
    X(no_pinned)       /* 1: no device memory */                                                                       \
    X(no_memory)       /* 1: no memory at all */                                                                       \
    X(delay_us)        /* how long qzCompress and qzDecompress take */                                                 \
    X(members)         /* members that a packet becomes, whatever its size; 0: as many as hw_buff_sz makes it */       \
    X(plain_gzip)      /* 1: members without QATzip's extra field */                                                   \
    X(header_byte)     /* which byte of each member's header is wrong, counted from 1 */                               \
    X(strict)          /* 1: qzDecompress refuses what QAT hardware does */                                            \
    /* Harm, see above. *_src_len and *_dst_len are added to the lengths that are reported. */                         \
    X(qzCompress_code) X(qzCompress_first) X(qzCompress_every)                                                         \
    X(qzCompress_src_len) X(qzCompress_dst_len) X(qzCompress_corrupt)                                                  \
    X(qzDecompress_code) X(qzDecompress_first) X(qzDecompress_every)                                                   \
    X(qzDecompress_src_len) X(qzDecompress_dst_len) X(qzDecompress_corrupt)                                            \
    /* Counters of calls. misuse: those that nobody may make, such as from a thread other than the session's. */       \
    X(qzInit_calls) X(qzClose_calls) X(qzSetupSessionDeflate_calls) X(qzTeardownSession_calls)                         \
    X(qzCompress_calls) X(qzDecompress_calls)                                                                          \
    X(mallocs) X(frees)                                                                                                \
    X(misuse)                                                                                                          \
    /* What the last session was opened with. */                                                                       \
    X(seen_init_sw_backup) X(seen_sw_backup) X(seen_level)                                                             \
    X(seen_log_level)  /* from 1, so that 0 is none */

enum number {
#define AS_ENUM(name) name,
    NUMBERS(AS_ENUM) COUNT
};

static const char *const names[COUNT] = {
#define AS_STRING(name) #name,
    NUMBERS(AS_STRING)
};

static _Atomic long numbers[COUNT];

// --- the switches ----------------------------------------------------------------------------------------------------

static enum number number_of(const char *name) {
    for (int at = 0; at < COUNT; at++)
        if (strcmp(name, names[at]) == 0) return (enum number)at;
    abort();
}

void stand_in_set(const char *name, long value) { numbers[number_of(name)] = value; }

long stand_in_get(const char *name) { return numbers[number_of(name)]; }

__attribute__((constructor)) static void read_environment(void) {
    for (int at = 0; at < COUNT; at++) {
        char variable[64] = "STAND_IN_";
        strncat(variable, names[at], sizeof variable - sizeof "STAND_IN_");
        const char *value = getenv(variable);
        if (value) numbers[at] = strtol(value, NULL, 0);
    }
}

// --- libqatzip's types and codes -------------------------------------------------------------------------------------

enum {
    QZ_OK = 0,
    QZ_DUPLICATE = 1,
    QZ_PARAMS = -1,
    QZ_FAIL = -2,
    QZ_BUF_ERROR = -3,
    QZ_DATA_ERROR = -4,
};

enum { NO_HARDWARE = 11, LOW_MEMORY = 14, FIRST_NOSW_CODE = -101 };

enum { GZIP = 1, GZIP_WITH_EXTRA_FIELD = 2 };

typedef struct {
    int64_t hw_session_stat;
    int32_t thread_state;
    void *internal;
    uint64_t total_in;
    uint64_t total_out;
} Session;

typedef struct {
    uint32_t direction;
    uint32_t level;
    uint8_t algorithm;
    uint32_t max_forks;
    uint8_t sw_backup;
    uint32_t hw_buff_sz;
    uint32_t strm_buff_sz;
    uint32_t input_threshold;
    uint32_t request_threshold;
    uint32_t wait_threshold;
    uint32_t polling;
    uint32_t sensitive_mode;
    uint32_t huffman_header;
    uint32_t data_format;
} Params;

_Static_assert(sizeof(Session) == 40 && sizeof(Params) == 56, "libqatzip's layout");

// What `internal` points to.
typedef struct {
    pthread_t owner;
    int is_set_up;
    int is_broken; // a payload was wrong: none is right any more
    Params params;
} Inner;

// --- helpers ---------------------------------------------------------------------------------------------------------

static int misused(void) {
    numbers[misuse]++;
    return QZ_PARAMS;
}

// The session's inner state, if the calling thread may use it.
static Inner *inner_of(Session *session) {
    Inner *inner = session ? session->internal : NULL;
    return inner && pthread_equal(inner->owner, pthread_self()) ? inner : NULL;
}

// Whether the call number `call`, from 1, does harm.
static int is_harmed(long call, enum number first, enum number every) {
    long up_to = numbers[first], each = numbers[every];
    if (up_to == 0 && each == 0) return 1;
    return call <= up_to || (each > 0 && call % each == 0);
}

static void pause_as_told(void) {
    long us = numbers[delay_us];
    struct timespec left = {us / 1000000, us % 1000000 * 1000};
    while (us > 0 && nanosleep(&left, &left) != 0) continue;
}

static uint32_t plus(uint32_t length, long add) {
    long sum = (long)length + add;
    return sum < 0 ? 0 : sum > UINT32_MAX ? UINT32_MAX : (uint32_t)sum;
}

static void put_u32(uint8_t *at, uint32_t value) {
    for (int byte = 0; byte < 4; byte++) at[byte] = (uint8_t)(value >> (8 * byte));
}

static uint32_t get_u32(const uint8_t *at) {
    return at[0] | (uint32_t)at[1] << 8 | (uint32_t)at[2] << 16 | (uint32_t)at[3] << 24;
}

enum { GZIP_HEADER = 10, EXTRA = 14, TRAILER = 8 };

static const uint8_t header_start[GZIP_HEADER] = {0x1f, 0x8b, 8, 4, 0, 0, 0, 0, 0, 0xff};
static const uint8_t extra_start[6] = {12, 0, 'Q', 'Z', 8, 0};

// Writes `src` as one member to `dst`, and its length to `written`.
static int write_member(const Params *params, const uint8_t *src, uint32_t len, uint8_t *dst, uint32_t room,
                        uint32_t *written) {
    int with_extra = params->data_format == GZIP_WITH_EXTRA_FIELD && !numbers[plain_gzip];
    uint32_t header = GZIP_HEADER + (with_extra ? EXTRA : 0);
    if (room < header + TRAILER) return QZ_BUF_ERROR;

    z_stream stream = {0};
    if (deflateInit2(&stream, (int)params->level, Z_DEFLATED, -15, 8, Z_DEFAULT_STRATEGY) != Z_OK) return QZ_FAIL;
    stream.next_in = (Bytef *)src;
    stream.avail_in = len;
    stream.next_out = dst + header;
    stream.avail_out = room - header - TRAILER;
    int result = deflate(&stream, Z_FINISH);
    uint32_t body = (uint32_t)stream.total_out;
    deflateEnd(&stream);
    if (result != Z_STREAM_END) return QZ_BUF_ERROR;

    memcpy(dst, header_start, sizeof header_start);
    if (with_extra) {
        memcpy(dst + GZIP_HEADER, extra_start, sizeof extra_start);
        put_u32(dst + GZIP_HEADER + sizeof extra_start, len);
        put_u32(dst + GZIP_HEADER + sizeof extra_start + 4, body);
    } else {
        dst[3] = 0;
    }
    long wrong = numbers[header_byte];
    if (wrong >= 1 && wrong <= (long)header) dst[wrong - 1] ^= 0xff;
    put_u32(dst + header + body, (uint32_t)crc32(0, src, len));
    put_u32(dst + header + body + 4, len);
    *written = header + body + TRAILER;
    return QZ_OK;
}

// Whether hardware would take the member that starts here.
static int is_for_hardware(const Params *params, const uint8_t *src, uint32_t len) {
    return len >= GZIP_HEADER + EXTRA && memcmp(src, header_start, sizeof header_start) == 0 &&
           memcmp(src + GZIP_HEADER, extra_start, sizeof extra_start) == 0 &&
           get_u32(src + GZIP_HEADER + sizeof extra_start) <= params->hw_buff_sz;
}

static int read_member(const uint8_t *src, uint32_t *src_len, uint8_t *dst, uint32_t *dst_len) {
    z_stream stream = {0};
    if (inflateInit2(&stream, 15 + 16) != Z_OK) return QZ_FAIL;
    stream.next_in = (Bytef *)src;
    stream.avail_in = *src_len;
    stream.next_out = dst;
    stream.avail_out = *dst_len;
    int result = inflate(&stream, Z_FINISH);
    int is_full = result == Z_BUF_ERROR && stream.avail_out == 0 && stream.avail_in > 0;
    *src_len = (uint32_t)stream.total_in;
    *dst_len = (uint32_t)stream.total_out;
    inflateEnd(&stream);
    return result == Z_STREAM_END ? QZ_OK : is_full ? QZ_BUF_ERROR : QZ_DATA_ERROR;
}

// --- libqatzip's functions -------------------------------------------------------------------------------------------

int qzSetLogLevel(int level) {
    numbers[seen_log_level] = level + 1;
    return 3;
}

static int lacks_hardware(long stat) { return stat >= NO_HARDWARE && stat <= LOW_MEMORY; }

// The session's status says nothing yet. A later QATzip answers QZ_DUPLICATE once it has found no hardware.
int qzInit(Session *session, unsigned char sw_backup) {
    numbers[qzInit_calls]++;
    if (!session || session->internal) return misused();
    numbers[seen_init_sw_backup] = sw_backup;
    long stat = numbers[hw_session_stat], code = numbers[qzInit_code];
    if (code < 0) return (int)code;
    if (code == QZ_OK && !sw_backup && lacks_hardware(stat)) return (int)(FIRST_NOSW_CODE - (stat - NO_HARDWARE));
    Inner *inner = calloc(1, sizeof *inner);
    if (!inner) return QZ_FAIL;
    inner->owner = pthread_self();
    session->internal = inner;
    return (int)code;
}

int qzGetDefaultsDeflate(Params *params) {
    if (!params) return misused();
    *params = (Params){
        .direction = 2,
        .level = 1,
        .algorithm = 8,
        .max_forks = 3,
        .sw_backup = 1,
        .hw_buff_sz = 65536,
        .strm_buff_sz = 65536,
        .input_threshold = 1024,
        .request_threshold = 32,
        .wait_threshold = 8,
        .data_format = GZIP_WITH_EXTRA_FIELD,
    };
    return (int)numbers[qzGetDefaultsDeflate_code];
}

int qzSetupSessionDeflate(Session *session, Params *params) {
    numbers[qzSetupSessionDeflate_calls]++;
    Inner *inner = inner_of(session);
    if (!inner || inner->is_set_up || !params) return misused();
    numbers[seen_level] = params->level;
    numbers[seen_sw_backup] = params->sw_backup;
    if (params->level < 1 || params->level > 12 || params->hw_buff_sz == 0) return QZ_PARAMS;
    if (params->data_format != GZIP && params->data_format != GZIP_WITH_EXTRA_FIELD) return QZ_PARAMS;
    long code = numbers[qzSetupSessionDeflate_code];
    if (code < 0) return (int)code;
    session->hw_session_stat = numbers[hw_session_stat];
    if (!params->sw_backup && lacks_hardware(session->hw_session_stat))
        return (int)(session->hw_session_stat = FIRST_NOSW_CODE);
    inner->params = *params;
    inner->is_set_up = 1;
    return (int)code;
}

// Generous enough for members of a single page.
unsigned qzMaxCompressedLength(unsigned src_len, Session *session) {
    (void)session;
    long told = numbers[bound];
    return told ? plus(0, told) : plus(src_len, src_len / 8 + 64);
}

void *qzMalloc(size_t len, int numa, int pinned) {
    (void)numa;
    if (numbers[no_memory] || (pinned && numbers[no_pinned])) return NULL;
    void *memory = malloc(len);
    // Not zero, as device memory that somebody else had before.
    if (memory) memset(memory, 0xa5, len), numbers[mallocs]++;
    return memory;
}

void qzFree(void *memory) {
    numbers[frees]++;
    free(memory);
}

int qzCompress(Session *session, const uint8_t *src, uint32_t *src_len, uint8_t *dst, uint32_t *dst_len,
               uint32_t last) {
    long call = ++numbers[qzCompress_calls];
    Inner *inner = inner_of(session);
    if (!inner || !inner->is_set_up || last != 1) return misused();
    if (!src || !src_len || *src_len == 0 || !dst || !dst_len) return misused();
    int harmed = is_harmed(call, qzCompress_first, qzCompress_every);
    pause_as_told();
    // A code replaces a success, as it may after the work is done.
    long code = harmed ? numbers[qzCompress_code] : 0;
    if (code < 0) {
        *src_len = *dst_len = 0;
        return (int)code;
    }

    uint32_t len = *src_len, parts = (uint32_t)numbers[members];
    uint32_t step = parts ? (len + parts - 1) / parts : inner->params.hw_buff_sz;
    uint32_t at = 0, written = 0;
    while (at < len) {
        uint32_t take = len - at < step ? len - at : step, member = 0;
        int result = write_member(&inner->params, src + at, take, dst + written, *dst_len - written, &member);
        if (result != QZ_OK) {
            *src_len = at;
            *dst_len = written;
            return result;
        }
        at += take;
        written += member;
    }
    session->total_in += len;
    session->total_out += written;

    if (harmed && numbers[qzCompress_corrupt]) dst[written / 2] ^= 0xff;
    *src_len = plus(len, harmed ? numbers[qzCompress_src_len] : 0);
    *dst_len = plus(written, harmed ? numbers[qzCompress_dst_len] : 0);
    return (int)code;
}

int qzDecompress(Session *session, const uint8_t *src, uint32_t *src_len, uint8_t *dst, uint32_t *dst_len) {
    long call = ++numbers[qzDecompress_calls];
    Inner *inner = inner_of(session);
    if (!inner || !inner->is_set_up) return misused();
    if (!src || !src_len || *src_len == 0 || !dst || !dst_len) return misused();
    int harmed = is_harmed(call, qzDecompress_first, qzDecompress_every);
    pause_as_told();
    long code = harmed ? numbers[qzDecompress_code] : 0;
    if (code < 0) {
        *src_len = *dst_len = 0;
        return (int)code;
    }

    uint32_t len = *src_len, at = 0, written = 0;
    while (at < len) {
        uint32_t taken = len - at, made = *dst_len - written;
        int result = inner->is_broken ? QZ_DATA_ERROR
                     : numbers[strict] && !is_for_hardware(&inner->params, src + at, taken)
                         ? QZ_FAIL
                         : read_member(src + at, &taken, dst + written, &made);
        inner->is_broken |= result == QZ_DATA_ERROR;
        if (result != QZ_OK) {
            *src_len = at;
            *dst_len = written;
            return result;
        }
        at += taken;
        written += made;
    }
    session->total_in += len;
    session->total_out += written;

    if (harmed && numbers[qzDecompress_corrupt] && written) dst[written / 2] ^= 0xff;
    *src_len = plus(len, harmed ? numbers[qzDecompress_src_len] : 0);
    *dst_len = plus(written, harmed ? numbers[qzDecompress_dst_len] : 0);
    return (int)code;
}

// There for programs that insist on every function. What it should fill in is not known here, so it always fails.
int qzGetStatus(Session *session, void *status) {
    (void)session;
    (void)status;
    return QZ_FAIL;
}

int qzTeardownSession(Session *session) {
    numbers[qzTeardownSession_calls]++;
    if (!session) return misused();
    if (!session->internal) return QZ_OK;
    Inner *inner = inner_of(session);
    if (!inner) return misused();
    inner->is_set_up = 0;
    return QZ_OK;
}

int qzClose(Session *session) {
    numbers[qzClose_calls]++;
    if (!session) return misused();
    if (!session->internal) return QZ_OK;
    Inner *inner = inner_of(session);
    if (!inner || inner->is_set_up) return misused();
    session->internal = NULL;
    free(inner);
    return QZ_OK;
}
