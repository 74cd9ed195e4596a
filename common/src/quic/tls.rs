//! Certificates: whom a connection trusts and what it shows. TLS 1.3 only, AES-128-GCM first.
//!
//! ```text
//!  real CA        ServerTls { certificate, key, client_ca }   ClientTls { ca, identity, server_name }
//!                                        |                                      |
//!                      mutual TLS when client_ca is given          verifies the server always
//!                      node_ca: see `nodes`
//!
//!  development    <directory>/ca.pem       what clients trust; its key is thrown away at once
//!                 <directory>/server.pem   for `millrace`, localhost, loopback and the names given
//!                 <directory>/server.key   readable by its owner only
//! ```
//!
//! A development directory appears whole or not at all: several processes may start at the same
//! time on one directory and use the same certificate.

use std::fs::{self, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use quinn::crypto::rustls::{QuicClientConfig, QuicServerConfig};
use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DnType, ExtendedKeyUsagePurpose, IsCa,
    KeyPair, KeyUsagePurpose,
};
use rustls::crypto::CryptoProvider;
use rustls::crypto::ring::{self, cipher_suite};
use rustls::pki_types::pem::{self, PemObject};
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::WebPkiClientVerifier;
use rustls::server::danger::ClientCertVerifier;
use rustls::{ClientConfig, RootCertStore, ServerConfig};

use super::PROTOCOL_PROBE;

mod nodes;

pub use nodes::{Voucher, make_development_cluster};

/// A name that every development certificate has, whatever the address of the server.
pub const DEVELOPMENT_NAME: &str = "millrace";

const CA_FILE: &str = "ca.pem";
const CERTIFICATE_FILE: &str = "server.pem";
const KEY_FILE: &str = "server.key";

/// A certificate chain and its key, as PEM files.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Identity {
    /// The chain, the own certificate first.
    pub certificate: PathBuf,
    /// The private key.
    pub key: PathBuf,
}

/// What the accepting side needs.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ServerTls {
    /// What it shows.
    pub identity: Identity,
    /// Mutual TLS: only clients with a certificate of this CA connect.
    pub client_ca: Option<PathBuf>,
    /// The CA of the cluster's nodes, which show their certificates when they dial.
    pub node_ca: Option<PathBuf>,
}

/// What the dialing side needs.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ClientTls {
    /// The CA that servers must have their certificate from.
    pub ca: PathBuf,
    /// What it shows to servers that ask for it.
    pub identity: Option<Identity>,
    /// The name that the server's certificate must have; the host of the dialed address if `None`.
    pub server_name: Option<String>,
}

/// Why a certificate, a key or a directory of them can't be used.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// A PEM file is missing, unreadable or not PEM.
    #[error("{}: {source}", path.display())]
    Pem {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        source: pem::Error,
    },
    /// A file holds no certificate.
    #[error("{}: no certificate in it", path.display())]
    Empty {
        /// The file.
        path: PathBuf,
    },
    /// A certificate, or the pair of certificate and key, is of no use.
    #[error("{}: {why}", path.display())]
    Unusable {
        /// The certificate's file.
        path: PathBuf,
        /// In TLS's words.
        why: String,
    },
    /// The development directory can't be made or is not whole.
    #[error("development certificate in {}: {source}", path.display())]
    Directory {
        /// The directory.
        path: PathBuf,
        /// What the file system says.
        source: io::Error,
    },
    /// A name can't be in a certificate.
    #[error("development certificate: {0}")]
    Generate(#[from] rcgen::Error),
}

/// The files of a development certificate.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Development {
    directory: PathBuf,
}

impl Development {
    /// Opens the directory; makes it first when it is missing or empty. `names` are the host names
    /// and addresses, without ports, under which the server is reached, besides the usual ones; they
    /// count only when the certificate is made.
    ///
    /// # Errors
    /// When the directory can't be made, or has some of the files and not all.
    pub fn open(directory: &Path, names: &[String]) -> Result<Self, TlsError> {
        let at_directory = |source| TlsError::Directory { path: directory.to_owned(), source };
        if is_missing_or_empty(directory).map_err(at_directory)? {
            make(directory, names)?;
        }
        let development = Self { directory: directory.to_owned() };
        for file in [CA_FILE, CERTIFICATE_FILE, KEY_FILE] {
            let path = directory.join(file);
            fs::metadata(&path).map_err(|source| TlsError::Directory { path, source })?;
        }
        Ok(development)
    }

    /// What a server shows.
    #[must_use]
    pub fn server(&self) -> ServerTls {
        let identity = Identity {
            certificate: self.directory.join(CERTIFICATE_FILE),
            key: self.directory.join(KEY_FILE),
        };
        ServerTls { identity, client_ca: None, node_ca: None }
    }

    /// What clients and other nodes trust.
    #[must_use]
    pub fn client(&self) -> ClientTls {
        ClientTls {
            ca: self.directory.join(CA_FILE),
            identity: None,
            server_name: Some(DEVELOPMENT_NAME.to_owned()),
        }
    }
}

fn is_missing_or_empty(directory: &Path) -> io::Result<bool> {
    match fs::read_dir(directory) {
        Ok(mut entries) => Ok(entries.next().is_none()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(true),
        Err(error) => Err(error),
    }
}

fn make(directory: &Path, names: &[String]) -> Result<(), TlsError> {
    let ca = DevelopmentCa::new()?;
    let (certificate, key) = ca.sign(names)?;
    let made = write_directory_at_once(directory, |beside| {
        write(&beside.join(CA_FILE), &ca.pem(), 0o644)?;
        write(&beside.join(CERTIFICATE_FILE), &certificate, 0o644)?;
        write(&beside.join(KEY_FILE), &key, 0o600)
    });
    match made {
        // Another process was faster: its files are as good.
        Err(_) if directory.join(KEY_FILE).exists() => Ok(()),
        other => other,
    }
}

/// Writes all files into a directory beside the wanted one and moves it there in one step.
#[expect(clippy::disallowed_methods, reason = "the id only keeps two starting processes apart")]
fn write_directory_at_once(
    directory: &Path,
    write_files: impl FnOnce(&Path) -> io::Result<()>,
) -> Result<(), TlsError> {
    let at_directory = |source| TlsError::Directory { path: directory.to_owned(), source };
    let mut beside = directory.as_os_str().to_owned();
    beside.push(format!(".new-{}", std::process::id()));
    let beside = PathBuf::from(beside);
    let written = (|| {
        fs::DirBuilder::new().recursive(true).mode(0o755).create(&beside)?;
        write_files(&beside)?;
        fs::rename(&beside, directory)
    })();
    if written.is_err() {
        // The first error counts; what stays behind is named after this process.
        let _ = fs::remove_dir_all(&beside);
    }
    written.map_err(at_directory)
}

fn write(path: &Path, text: &str, mode: u32) -> io::Result<()> {
    let mut file = OpenOptions::new().write(true).create_new(true).mode(mode).open(path)?;
    file.write_all(text.as_bytes())?;
    file.sync_all()
}

/// A CA that lives as long as this value.
struct DevelopmentCa {
    issuer: CertifiedIssuer<'static, KeyPair>,
}

impl DevelopmentCa {
    fn new() -> Result<Self, rcgen::Error> {
        let mut ca = CertificateParams::new(Vec::new())?;
        ca.distinguished_name.push(DnType::CommonName, "Millrace development CA");
        ca.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        ca.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        Ok(Self { issuer: CertifiedIssuer::self_signed(ca, KeyPair::generate()?)? })
    }

    fn pem(&self) -> String {
        self.issuer.pem()
    }

    /// PEM of a certificate for the usual names and these, and of its key.
    fn sign(&self, names: &[String]) -> Result<(String, String), rcgen::Error> {
        let usual = [DEVELOPMENT_NAME, "localhost", "127.0.0.1", "::1"].map(str::to_owned);
        let extra = names.iter().filter(|name| !usual.contains(name)).cloned();
        let all_names: Vec<String> = usual.iter().cloned().chain(extra).collect();
        let mut server = CertificateParams::new(all_names)?;
        server.distinguished_name.push(DnType::CommonName, "Millrace development server");
        server.use_authority_key_identifier_extension = true;
        server.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        server.extended_key_usages =
            vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        let key = KeyPair::generate()?;
        let certificate = server.signed_by(&key, &self.issuer)?;
        Ok((certificate.pem(), key.serialize_pem()))
    }
}

pub(super) fn server_config(
    tls: &ServerTls,
    protocols: &[String],
) -> Result<QuicServerConfig, TlsError> {
    let path = &tls.identity.certificate;
    let unusable = |why: String| TlsError::Unusable { path: path.clone(), why };
    let builder = ServerConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&rustls::version::TLS13])
        .map_err(|error| unusable(error.to_string()))?;
    let builder = match client_verifier(tls)? {
        None => builder.with_no_client_auth(),
        Some(verifier) => builder.with_client_cert_verifier(verifier),
    };
    let mut config = builder
        .with_single_cert(certificates(path)?, key(&tls.identity.key)?)
        .map_err(|error| unusable(error.to_string()))?;
    config.alpn_protocols = alpn(protocols);
    // Connections live long: tickets would be sent for nothing.
    config.send_tls13_tickets = 0;
    QuicServerConfig::try_from(config).map_err(|error| unusable(error.to_string()))
}

/// Whose certificates are taken. Who needs none may come without, where only nodes have them.
fn client_verifier(tls: &ServerTls) -> Result<Option<Arc<dyn ClientCertVerifier>>, TlsError> {
    let cas = [&tls.client_ca, &tls.node_ca];
    let Some(first) = cas.into_iter().flatten().next() else { return Ok(None) };
    let mut trusted = RootCertStore::empty();
    for ca in cas.into_iter().flatten() {
        trusted.roots.extend(roots(ca)?.roots);
    }
    let builder = WebPkiClientVerifier::builder_with_provider(trusted.into(), provider());
    let builder = if tls.client_ca.is_none() { builder.allow_unauthenticated() } else { builder };
    let verifier = builder
        .build()
        .map_err(|error| TlsError::Unusable { path: first.clone(), why: error.to_string() })?;
    Ok(Some(verifier))
}

pub(super) fn client_config(
    tls: &ClientTls,
    protocols: &[String],
) -> Result<QuicClientConfig, TlsError> {
    let path = tls.identity.as_ref().map_or(&tls.ca, |identity| &identity.certificate);
    let unusable = |why: String| TlsError::Unusable { path: path.clone(), why };
    let builder = ClientConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&rustls::version::TLS13])
        .map_err(|error| unusable(error.to_string()))?
        .with_root_certificates(roots(&tls.ca)?);
    let mut config = match &tls.identity {
        None => builder.with_no_client_auth(),
        Some(identity) => builder
            .with_client_auth_cert(certificates(path)?, key(&identity.key)?)
            .map_err(|error| unusable(error.to_string()))?,
    };
    config.alpn_protocols = alpn(protocols);
    QuicClientConfig::try_from(config).map_err(|error| unusable(error.to_string()))
}

/// Ring with the cheapest suite first; QUIC's own first packets need AES-128-GCM anyway.
fn provider() -> Arc<CryptoProvider> {
    let mut provider = ring::default_provider();
    provider.cipher_suites = vec![
        cipher_suite::TLS13_AES_128_GCM_SHA256,
        cipher_suite::TLS13_AES_256_GCM_SHA384,
        cipher_suite::TLS13_CHACHA20_POLY1305_SHA256,
    ];
    provider.into()
}

fn alpn(protocols: &[String]) -> Vec<Vec<u8>> {
    let names = protocols.iter().map(String::as_str).chain([PROTOCOL_PROBE]);
    names.map(|name| name.as_bytes().to_vec()).collect()
}

/// The certificates of a PEM file, in their order.
///
/// # Errors
/// When it can't be read or holds none.
pub fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let at_file = |source| TlsError::Pem { path: path.to_owned(), source };
    let certificates = CertificateDer::pem_file_iter(path)
        .map_err(at_file)?
        .collect::<Result<Vec<_>, _>>()
        .map_err(at_file)?;
    if certificates.is_empty() {
        return Err(TlsError::Empty { path: path.to_owned() });
    }
    Ok(certificates)
}

/// The private key of a PEM file.
///
/// # Errors
/// When it can't be read or holds none.
pub fn key(path: &Path) -> Result<PrivateKeyDer<'static>, TlsError> {
    PrivateKeyDer::from_pem_file(path)
        .map_err(|source| TlsError::Pem { path: path.to_owned(), source })
}

/// The certificates of a PEM file as what to trust.
///
/// # Errors
/// When it can't be read or holds none that can be trusted.
pub fn roots(path: &Path) -> Result<RootCertStore, TlsError> {
    let mut roots = RootCertStore::empty();
    for certificate in certificates(path)? {
        roots.add(certificate).map_err(|error| TlsError::Unusable {
            path: path.to_owned(),
            why: error.to_string(),
        })?;
    }
    Ok(roots)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn protocols() -> Vec<String> {
        vec!["millrace/1".to_owned()]
    }

    #[test]
    fn a_second_start_keeps_the_certificate_and_only_the_owner_reads_the_key() {
        let temp = tempfile::tempdir().unwrap();
        let directory = temp.path().join("tls");
        let first = Development::open(&directory, &["10.1.2.3".to_owned()]).unwrap();
        let before = fs::read(directory.join(CERTIFICATE_FILE)).unwrap();
        let second = Development::open(&directory, &[]).unwrap();
        assert_eq!(first, second);
        assert_eq!(before, fs::read(directory.join(CERTIFICATE_FILE)).unwrap());
        let mode = fs::metadata(directory.join(KEY_FILE)).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        assert_eq!(fs::read_dir(temp.path()).unwrap().count(), 1, "nothing is left beside it");
        server_config(&first.server(), &protocols()).unwrap();
        client_config(&first.client(), &protocols()).unwrap();
    }

    #[test]
    fn a_loser_of_the_race_uses_the_winners_files() {
        let temp = tempfile::tempdir().unwrap();
        let directory = temp.path().join("tls");
        make(&directory, &[]).unwrap();
        let winner = fs::read(directory.join(CA_FILE)).unwrap();
        make(&directory, &[]).unwrap();
        assert_eq!(winner, fs::read(directory.join(CA_FILE)).unwrap());
    }

    #[test]
    fn a_directory_that_lacks_a_file_is_not_overwritten() {
        let temp = tempfile::tempdir().unwrap();
        let directory = temp.path().join("tls");
        Development::open(&directory, &[]).unwrap();
        fs::remove_file(directory.join(KEY_FILE)).unwrap();
        let error = Development::open(&directory, &[]).unwrap_err();
        assert!(error.to_string().contains(KEY_FILE), "{error}");
    }

    #[test]
    fn errors_name_the_file() {
        let temp = tempfile::tempdir().unwrap();
        let directory = temp.path().join("tls");
        let development = Development::open(&directory, &[]).unwrap();
        let empty = temp.path().join("empty.pem");
        fs::write(&empty, "").unwrap();

        let tls = ClientTls { ca: empty, ..development.client() };
        let error = client_config(&tls, &protocols()).err().unwrap();
        assert!(error.to_string().contains("empty.pem"), "{error}");

        let mut tls = development.server();
        tls.identity.key = temp.path().join("no.key");
        let error = server_config(&tls, &protocols()).err().unwrap();
        assert!(
            matches!(&error, TlsError::Pem { path, .. } if path.ends_with("no.key")),
            "{error}"
        );
    }
}
