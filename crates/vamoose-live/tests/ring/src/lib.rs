//! A VMM with a TLS of its own, by ring, beside vamoose-live.

#[cfg(test)]
mod tests {
    use std::{sync::Arc, thread};

    use rustls::{ClientConfig, RootCertStore};
    use vamoose_live::{
        Acceptor, Destination, DestinationConfig, DestinationGuest, GuestError, Listener, Ram,
        Remote, Source, SourceGuest,
        dirty::SharedBitmap,
        session::{OneTimeKey, Security, SessionConfig, Sessions},
        vm_memory::{Bytes, GuestAddress, GuestMemoryMmap},
    };

    struct Vm;

    impl SourceGuest for Vm {
        fn pause(&mut self) -> Result<(), GuestError> {
            Ok(())
        }

        fn resume(&mut self) -> Result<(), GuestError> {
            Ok(())
        }

        fn save(&mut self) -> Result<Vec<u8>, GuestError> {
            Ok(b"devices".to_vec())
        }
    }

    impl DestinationGuest for Vm {
        fn load(&mut self, state: &[u8]) -> Result<(), GuestError> {
            assert_eq!(state, b"devices");
            Ok(())
        }

        fn resume(&mut self) -> Result<(), GuestError> {
            Ok(())
        }
    }

    /// What Cloud Hypervisor calls: it panics where the features of rustls leave no default provider.
    #[test]
    fn the_default_provider_of_the_vmm_stays_ring() {
        let config = ClientConfig::builder()
            .with_root_certificates(RootCertStore::empty())
            .with_no_client_auth();
        let ours: Vec<_> = config
            .crypto_provider()
            .cipher_suites
            .iter()
            .map(|it| it.suite())
            .collect();
        let ring: Vec<_> = rustls::crypto::ring::default_provider()
            .cipher_suites
            .iter()
            .map(|it| it.suite())
            .collect();
        assert_eq!(ours, ring);
    }

    #[test]
    fn a_guest_moves_over_an_authenticated_session() {
        let memory = || GuestMemoryMmap::<()>::from_ranges(&[(GuestAddress(0), 8 << 20)]).unwrap();
        let (here, there) = (memory(), memory());
        here.write_obj(42_u64, GuestAddress(0x5000)).unwrap();
        let [near, far] = [(); 2].map(|()| OneTimeKey::generate().unwrap());
        let security = |own: &OneTimeKey, peer: &OneTimeKey| Security::OneTime {
            own: own.clone(),
            peer: peer.public(),
        };
        let config = SessionConfig::new(security(&far, &near));
        let listener =
            Listener::bind(&"tcp:127.0.0.1:0".parse().unwrap(), config.stall_timeout).unwrap();
        let address = listener.address().to_string();
        let acceptor = Acceptor::Sessions(Sessions::new(vec![listener], config).unwrap());
        let ram = Ram::of_guest(&there).unwrap();
        let mut destination =
            Destination::new(acceptor, ram, DestinationConfig::default()).unwrap();
        let arriving = thread::spawn(move || destination.run(&mut Vm).map(drop));
        let to = Remote::new(&address, security(&near, &far)).unwrap();
        let ram = Ram::of_guest(&here).unwrap();
        let source = Source::new(&ram, Arc::new(SharedBitmap::new(&ram))).unwrap();
        let handle = source.handle();
        source.run(to, &mut Vm).unwrap();
        arriving.join().unwrap().unwrap();
        assert!(handle.session().unwrap().cipher().is_some());
        let moved: u64 = there.read_obj(GuestAddress(0x5000)).unwrap();
        assert_eq!(moved, 42);
    }
}
