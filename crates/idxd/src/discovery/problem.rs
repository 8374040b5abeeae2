//! Reasons why a work queue cannot be used.

use std::{io, path::PathBuf};

use thiserror::Error;

/// Why a work queue or a device cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum Problem {
    /// The device is not enabled.
    #[error("its device is {0}; it has to be enabled")]
    DeviceState(String),
    /// The work queue is not enabled.
    #[error("it is {0}; it has to be enabled")]
    QueueState(String),
    /// The work queue is for the kernel, or not set up.
    #[error("its type is {0}; it has to be user")]
    Type(String),
    /// The work queue is bound to another driver than `user`.
    #[error("driver {0} has it; it has to be user")]
    Driver(String),
    /// Address translation is disabled: the work queue may report success although a write faulted (DSA 3.0, 3.13.1), and
    /// the output would be lost.
    #[error(
        "it can report success for a write that failed, as its attribute ats_disable is 1: set it to 0 while the work \
         queue is disabled"
    )]
    AtsDisabled,
    /// The work queue is dedicated: a descriptor for which it has no room would be lost without a notice.
    #[error("its mode is {0}; it has to be shared")]
    Mode(String),
    /// There is no character device: none of these paths exists.
    #[error("it has no character device: there is no {}", list(.0))]
    NoNode(Vec<PathBuf>),
    /// The file at that path is not this queue's character device.
    #[error("{} is not its character device", .0.display())]
    OtherNode(PathBuf),
    /// This process may not open the character device.
    #[error("this process may not read and write {}", .0.display())]
    Denied(PathBuf),
    /// The character device cannot be examined.
    #[error("{}: {kind}", path.display())]
    Node {
        /// The character device.
        path: PathBuf,
        /// Why.
        kind: io::ErrorKind,
    },
    /// The device cannot work in this process's address space.
    #[error(
        "its device cannot use the addresses of processes: VT-d and PASID have to be on in the firmware, and the kernel \
         has to be started with intel_iommu=on,sm_on"
    )]
    NoAddressSpace,
    /// The work queue disappeared, or was disabled, while it was examined or opened.
    #[error("it has disappeared")]
    Gone,
    /// An attribute is missing.
    #[error("it has no attribute {attribute}")]
    Missing {
        /// The name of the file.
        attribute: &'static str,
    },
    /// An attribute cannot be read.
    #[error("its attribute {attribute} cannot be read: {kind}")]
    Unreadable {
        /// The name of the file.
        attribute: &'static str,
        /// Why.
        kind: io::ErrorKind,
    },
    /// An attribute is malformed.
    #[error("its attribute {attribute} makes no sense: {value:?}")]
    Garbled {
        /// The name of the file.
        attribute: &'static str,
        /// The beginning of its value.
        value: String,
    },
}

fn list(paths: &[PathBuf]) -> String {
    let paths: Vec<String> = paths
        .iter()
        .map(|path| path.display().to_string())
        .collect();
    paths.join(" or ")
}
