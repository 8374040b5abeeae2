//! Modelled devices for the offloads.

use idxd::{
    Kind, OpenQueueError, Queue,
    offload::{Devices, Options},
};

use crate::{Config, Faults, Model, PortalKind};

/// The first work queue of each of `count` typical devices, in real time. `root` and `shares` of `options` do not apply.
///
/// With cargo feature `fault-injection`, and the environment variable `VAMOOSE_MODEL_FAULTS` set to a random seed,
/// the devices have all kinds of faults ([`Faults::everything`]).
///
/// # Errors
/// As [`Queue::new`].
pub fn devices(kind: Kind, count: usize, options: &Options) -> Result<Devices, OpenQueueError> {
    let mut config = Config::devices(kind, count);
    if cfg!(feature = "fault-injection")
        && let Ok(seed) = std::env::var("VAMOOSE_MODEL_FAULTS")
    {
        config.faults = Faults::everything();
        config.seed = seed.parse().unwrap_or_default();
    }
    let model = Model::timed(&config);
    let queues = (0..count).map(|device| {
        let submit = model.queue(device, 0, PortalKind::Enqcmd);
        Queue::new(submit, options.shape, options.tuning)
    });
    let queues = queues.collect::<Result<Vec<_>, OpenQueueError>>()?;
    Ok(Devices::new(queues))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn models_of_either_kind_can_be_opened() {
        let dsa = devices(Kind::Dsa, 2, &Options::batches(128)).unwrap();
        let iaa = devices(Kind::Iaa, 2, &Options::pages(4096)).unwrap();
        assert_eq!([dsa.queues().count(), iaa.queues().count()], [2, 2]);
        assert!(dsa.work().model && iaa.work().model);
    }
}
