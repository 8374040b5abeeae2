//! Encryption of stock QEMU's migrations, by certificates (`tls-creds-x509`).

use std::fs;

use anyhow::{Context as _, Result};
use lab::qemu::Qemu;
use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DnType, ExtendedKeyUsagePurpose, IsCa,
    KeyPair, KeyUsagePurpose,
};
use serde_json::json;
use tempfile::TempDir;

/// The certificates of both ends, in a folder with QEMU's file names.
pub(super) struct Certificates(TempDir);

/// The name in the destination's certificate.
const HOST: &str = "destination.invalid";

/// The object that QEMU has them in.
const CREDENTIALS: &str = "tls0";

impl Certificates {
    pub(super) fn make() -> Result<Self> {
        let folder = TempDir::new().context("creating a folder for certificates")?;
        let mut authority = CertificateParams::default();
        // QEMU takes a certificate for an authority's whose subject and issuer have the same name.
        let name = &mut authority.distinguished_name;
        name.push(DnType::CommonName, "authority");
        authority.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        authority.key_usages = vec![KeyUsagePurpose::KeyCertSign];
        let authority = CertifiedIssuer::self_signed(authority, KeyPair::generate()?)?;
        let write = |name: &str, text: String| {
            let path = folder.path().join(name);
            fs::write(&path, text).with_context(|| format!("writing {}", path.display()))
        };
        write("ca-cert.pem", authority.pem())?;
        for (end, purpose) in [
            ("server", ExtendedKeyUsagePurpose::ServerAuth),
            ("client", ExtendedKeyUsagePurpose::ClientAuth),
        ] {
            let mut params = CertificateParams::new(vec![HOST.to_owned()])?;
            params.extended_key_usages = vec![purpose];
            // QEMU asks for both, whatever the kind of key.
            params.key_usages = vec![
                KeyUsagePurpose::DigitalSignature,
                KeyUsagePurpose::KeyEncipherment,
            ];
            let key = KeyPair::generate()?;
            let certificate = params.signed_by(&key, &authority)?;
            write(&format!("{end}-cert.pem"), certificate.pem())?;
            write(&format!("{end}-key.pem"), key.serialize_pem())?;
        }
        Ok(Self(folder))
    }

    /// Makes both QEMUs authenticate each other, and encrypt their migration.
    pub(super) fn use_in(&self, source: &mut Qemu, destination: &mut Qemu) -> Result<()> {
        for (qemu, endpoint) in [(source, "client"), (destination, "server")] {
            let object = json!({
                "qom-type": "tls-creds-x509", "id": CREDENTIALS, "dir": self.0.path(), "endpoint": endpoint,
                "verify-peer": true,
            });
            qemu.qmp.execute("object-add", object)?;
            let parameters = json!({ "tls-creds": CREDENTIALS, "tls-hostname": HOST });
            qemu.qmp.set_parameters(parameters)?;
        }
        Ok(())
    }
}

/// Makes a QEMU whose guest has come by [`Certificates::use_in`] forget them: its guest may leave it in another way.
pub(super) fn forget(qemu: &mut Qemu) -> Result<()> {
    let parameters = json!({ "tls-creds": "", "tls-hostname": "" });
    qemu.qmp.set_parameters(parameters)?;
    // An error: there are none.
    let _ = qemu.qmp.execute("object-del", json!({ "id": CREDENTIALS }));
    Ok(())
}

#[cfg(test)]
mod tests {
    use lab::qemu::{self, Builder};

    use super::*;

    #[test]
    fn qemu_takes_the_certificates_again_and_again() -> Result<()> {
        let Some(binary) = qemu::newest_or_skip()? else {
            return Ok(());
        };
        let bare = Builder::bare(&binary, 8 << 20);
        let (mut source, mut destination) = (bare.start()?, bare.clone().incoming().start()?);
        for _ in 0..2 {
            Certificates::make()?.use_in(&mut source, &mut destination)?;
            forget(&mut source)?;
            forget(&mut destination)?;
        }
        Ok(())
    }
}
