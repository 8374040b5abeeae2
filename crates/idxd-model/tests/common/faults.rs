//! What can go wrong, at random, for tests of the model and of what drives it.

use std::time::Duration;

use proptest::{collection::vec, prelude::*};

use idxd_model::{At, Chance, Faults, InjectedFault, On};

/// Everything but wrong results.
pub(crate) fn harmless() -> impl Strategy<Value = InjectedFault> {
    let time = (0u64..3_000_000).prop_map(Duration::from_nanos);
    prop_oneof![
        (any::<bool>(), any::<bool>()).prop_map(|(write, refused)| InjectedFault::PageFault {
            at: At::Anywhere,
            write,
            refused
        }),
        time.clone().prop_map(InjectedFault::Slow),
        time.clone().prop_map(InjectedFault::Late),
        time.prop_map(InjectedFault::RecordLate),
        Just(InjectedFault::Stuck),
        Just(InjectedFault::StuckEngine),
        Just(InjectedFault::RecordLost),
        (0u32..5).prop_map(InjectedFault::ListFault),
        (0x20u8..0x25).prop_map(InjectedFault::Status),
    ]
}

/// Fewer than `most` chances, of these faults.
pub(crate) fn any_faults(
    fault: impl Strategy<Value = InjectedFault>,
    most: usize,
) -> impl Strategy<Value = Faults> {
    let chance = (0u16..150, fault).prop_map(|(per_mille, fault)| Chance {
        per_mille,
        on: On::any(),
        fault,
    });
    (vec(chance, 0..most), 0u32..128, 0u16..500).prop_map(
        |(chances, competitor, full_per_mille)| Faults {
            chances,
            competitor,
            full_per_mille,
        },
    )
}
