//! The smallest VMM: its guest is a number in memory, which migrates from one half of this process to the other.

use std::{sync::Arc, thread};

use vamoose_live::{
    Destination, DestinationGuest, GuestError, Ram, Remote, Source, SourceGuest,
    dirty::SharedBitmap,
    session::Security,
    vm_memory::{Bytes, GuestAddress, GuestMemoryMmap},
};

struct Vm(&'static str);

impl SourceGuest for Vm {
    fn pause(&mut self) -> Result<(), GuestError> {
        println!("{}: paused", self.0);
        Ok(())
    }

    fn resume(&mut self) -> Result<(), GuestError> {
        println!("{}: it did not move, and runs again", self.0);
        Ok(())
    }

    fn save(&mut self) -> Result<Vec<u8>, GuestError> {
        Ok(b"the state of its devices".to_vec())
    }
}

impl DestinationGuest for Vm {
    fn load(&mut self, state: &[u8]) -> Result<(), GuestError> {
        println!("{}: {}", self.0, String::from_utf8_lossy(state));
        Ok(())
    }

    fn resume(&mut self) -> Result<(), GuestError> {
        println!("{}: runs", self.0);
        Ok(())
    }
}

fn main() -> Result<(), GuestError> {
    const NUMBER: GuestAddress = GuestAddress(0x5000);
    let memory = || GuestMemoryMmap::<()>::from_ranges(&[(GuestAddress(0), 64 << 20)]);
    let (here, there) = (memory()?, memory()?);
    here.write_obj(42_u64, NUMBER)?;
    // Between two hosts: `Keys::at("/etc/my-vmm/keys")` at both ends.
    let ram = Ram::of_guest(&there)?;
    let mut destination = Destination::listen("tcp:127.0.0.1:0", Security::Insecure, &ram)?;
    let address = destination.addresses()[0].to_string();
    let arriving = thread::spawn(move || destination.run(&mut Vm("destination")));

    let ram = Ram::of_guest(&here)?;
    let log = Arc::new(SharedBitmap::new(&ram));
    let to = Remote::new(&address, Security::Insecure)?;
    Source::new(&ram, log)?.run(to, &mut Vm("source"))?;
    arriving.join().map_err(|_| "the destination's thread")??;
    assert_eq!(there.read_obj::<u64>(NUMBER)?, 42);
    Ok(())
}
