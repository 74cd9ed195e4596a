//! The nodes of a cluster vouch for each other: one CA, and a name in each node's certificate.
//!
//! ```text
//!  dialing node                                           accepting node
//!  verifies the server's certificate for node 2's name    TLS: shown certificates are of a known CA
//!  shows its own                                          hello of n1: Voucher::vouch(chain, n1's name)
//! ```
//!
//! Clients need no certificate, or one of another CA: TLS alone does not make a peer a node.

use std::path::Path;
use std::sync::Arc;

use rustls::client::verify_server_name;
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::server::danger::ClientCertVerifier;
use rustls::server::{ParsedCertificate, WebPkiClientVerifier};

use super::{CA_FILE, DevelopmentCa, TlsError, provider, roots, write, write_directory_at_once};

/// Says whether a chain of certificates makes a peer the node that it claims to be.
#[derive(Clone, Debug)]
pub struct Voucher {
    verifier: Arc<dyn ClientCertVerifier>,
}

impl Voucher {
    /// One that trusts this CA, a PEM file.
    ///
    /// # Errors
    /// When the file is of no use.
    pub fn open(ca: &Path) -> Result<Self, TlsError> {
        let verifier = WebPkiClientVerifier::builder_with_provider(roots(ca)?.into(), provider())
            .build()
            .map_err(|error| TlsError::Unusable { path: ca.to_owned(), why: error.to_string() })?;
        Ok(Self { verifier })
    }

    /// Checks a chain, the peer's own certificate first: signed by the CA, valid now, for this name.
    ///
    /// # Errors
    /// What is wrong with it, for people.
    pub fn vouch(&self, chain: &[CertificateDer<'_>], name: &str) -> Result<(), String> {
        let Some((own, rest)) = chain.split_first() else {
            return Err("no certificate was shown".to_owned());
        };
        self.verifier
            .verify_client_cert(own, rest, UnixTime::now())
            .map_err(|error| error.to_string())?;
        let parsed = ParsedCertificate::try_from(own).map_err(|error| error.to_string())?;
        let wanted = ServerName::try_from(name).map_err(|error| format!("{name}: {error}"))?;
        verify_server_name(&parsed, &wanted)
            .map_err(|_| format!("the certificate is not for the name {name}"))
    }
}

/// Makes a directory with the certificates of a development cluster, unless it exists: `ca.pem`, and for each
/// `(stem, names)` a `stem.pem` and a `stem.key`. The CA's key is thrown away.
///
/// # Errors
/// When the directory can't be made, or a name can't be in a certificate.
pub fn make_development_cluster(
    directory: &Path,
    nodes: &[(String, Vec<String>)],
) -> Result<(), TlsError> {
    if directory.join(CA_FILE).exists() {
        return Ok(());
    }
    let ca = DevelopmentCa::new()?;
    let mut files = Vec::with_capacity(nodes.len());
    for (stem, names) in nodes {
        files.push((stem, ca.sign(names)?));
    }
    write_directory_at_once(directory, |beside| {
        write(&beside.join(CA_FILE), &ca.pem(), 0o644)?;
        files.iter().try_for_each(|(stem, (certificate, key))| {
            write(&beside.join(format!("{stem}.pem")), certificate, 0o644)?;
            write(&beside.join(format!("{stem}.key")), key, 0o600)
        })
    })
}

#[cfg(test)]
mod tests {
    use super::super::certificates;
    use super::*;

    #[test]
    fn only_the_cas_own_certificate_for_the_name_makes_a_node() {
        let temp = tempfile::tempdir().unwrap();
        let make = |name: &str| {
            let directory = temp.path().join(name);
            let nodes = [("n1", "one"), ("n2", "two")]
                .map(|(stem, name)| (stem.to_owned(), vec![name.to_owned()]));
            make_development_cluster(&directory, &nodes).unwrap();
            directory
        };
        let (ours, foreign) = (make("ours"), make("foreign"));
        let voucher = Voucher::open(&ours.join("ca.pem")).unwrap();
        let chain = certificates(&ours.join("n1.pem")).unwrap();
        voucher.vouch(&chain, "one").unwrap();
        let error = voucher.vouch(&chain, "two").unwrap_err();
        assert!(error.contains("two"), "{error}");
        let error = voucher.vouch(&certificates(&foreign.join("n1.pem")).unwrap(), "one");
        assert!(error.is_err());
        assert!(voucher.vouch(&[], "one").is_err());
        // A second call leaves what is there.
        let before = std::fs::read(ours.join("n2.key")).unwrap();
        make("ours");
        assert_eq!(before, std::fs::read(ours.join("n2.key")).unwrap());
    }
}
