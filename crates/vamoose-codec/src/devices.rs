//! Devices of Intel's data accelerators, as users of this crate open them.

use idxd::{
    Kind,
    offload::{Choice, Devices, Options},
};

/// Opens the devices of one kind that are chosen, as [`Devices::open`] does, or says why that cannot be.
///
/// In builds for tests (cargo feature `fault-injection`) everything goes wrong with devices in software that can go
/// wrong ([`Faults::everything`](idxd::model::Faults::everything)), if the environment variable
/// `VAMOOSE_MODEL_FAULTS` is set: to the seed by which it does.
///
/// # Errors
/// When there are no such devices, or they cannot be opened: in words for the user.
pub fn open_devices(kind: Kind, choice: &Choice, options: Options) -> Result<Devices, String> {
    #[cfg(feature = "fault-injection")]
    let options = crate::faulty::model_from_environment(options)?;
    Devices::open(kind, choice, &options).map_err(|error| {
        format!("{error} (`vamoose probe` shows what there is and what is missing)")
    })
}
