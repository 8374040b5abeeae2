//! What can go wrong, at random, for tests of the model and of what drives it.

use std::time::Duration;

use proptest::{collection::vec, prelude::*};

use idxd_model::{At, Chance, Faults, Mishap, On, Order};

/// Everything but wrong results.
pub(crate) fn harmless() -> impl Strategy<Value = Mishap> {
    let time = (0u64..3_000_000).prop_map(Duration::from_nanos);
    prop_oneof![
        (any::<bool>(), any::<bool>()).prop_map(|(write, refused)| Mishap::PageFault {
            at: At::Anywhere,
            write,
            refused
        }),
        time.clone().prop_map(Mishap::Slow),
        time.clone().prop_map(Mishap::Late),
        time.prop_map(Mishap::RecordLate),
        Just(Mishap::Stuck),
        Just(Mishap::StuckEngine),
        Just(Mishap::RecordLost),
        Just(Mishap::BatchFirst),
        (0u32..5).prop_map(Mishap::ListFault),
        (0x20u8..0x25).prop_map(Mishap::Status),
    ]
}

/// Fewer than `most` chances, of these mishaps.
pub(crate) fn any_faults(
    mishap: impl Strategy<Value = Mishap>,
    most: usize,
) -> impl Strategy<Value = Faults> {
    let chance = (0u16..150, mishap).prop_map(|(per_mille, mishap)| Chance {
        per_mille,
        on: On::any(),
        mishap,
    });
    let order = prop_oneof![Just(Order::AsDone), Just(Order::Reverse)];
    (vec(chance, 0..most), 0u32..128, 0u16..500, order).prop_map(
        |(chances, competitor, full_per_mille, order)| Faults {
            chances,
            competitor,
            full_per_mille,
            order,
        },
    )
}
