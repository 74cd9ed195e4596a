//! Registers: where the cluster's one small value lives.
//!
//! ```text
//!                        +-- FileRegister        one node: two slots in its directory
//! apply(op) --> Register +-- SharedFileRegister  the nodes of one machine: the same, under a lock
//!                        +-- PostgresRegister    one row of the table millrace_register
//!                        `-- EtcdRegister        one key
//! ```
//!
//! All keep one contract, as the simulated one does; `tests/tests/register_contract.rs` tests it on the real
//! things:
//!
//! - *Written* and *lost* are facts that the register itself has stated.
//! - *Unavailable* is a promise: this request was not carried out and never will be.
//! - Whatever lies between, a cut connection, silence, a server that ends, is *indeterminate*. No write is
//!   sent twice, since the second could lose against the first.
//! - A question is answered within [`ANSWER_TIMEOUT`] or what the URL says; the file's takes as long as its
//!   disk.

#[cfg(feature = "etcd")]
mod etcd;
mod file;
mod postgres;
mod url;

use std::path::{Path, PathBuf};

use common::quic::tls::{Identity, TlsError};
use common::register::{REGISTER_BYTES_MAX, RegisterOp, RegisterOutcome};
use thiserror::Error;

#[cfg(feature = "etcd")]
pub use etcd::EtcdRegister;
pub use file::{FileRegister, RegisterError, SharedFileRegister};
pub use postgres::PostgresRegister;
pub use url::{ANSWER_TIMEOUT, RegisterUrl, RegisterUrlError, Secret, ServerUrl};

/// Which register a cluster uses.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RegisterOptions {
    /// Where it is.
    pub url: RegisterUrl,
    /// The cluster's name: the row or key. Clusters that share a server differ in it.
    pub cluster: String,
    /// What proves the URL's user; wins over a password in the URL.
    pub password: Option<Secret>,
    /// How its server is verified; without it there is no TLS.
    pub tls: Option<RegisterTls>,
}

/// PEM files.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RegisterTls {
    /// The certificates of the CA that has signed the server's.
    pub ca: PathBuf,
    /// What the client shows.
    pub identity: Option<Identity>,
}

/// The name of a cluster that was given none.
pub const CLUSTER_NAME: &str = "millrace";

impl Default for RegisterOptions {
    fn default() -> Self {
        Self::new(RegisterUrl::File)
    }
}

impl RegisterOptions {
    /// A register without TLS, by the default name.
    #[must_use]
    pub fn new(url: RegisterUrl) -> Self {
        Self { url, cluster: CLUSTER_NAME.to_owned(), password: None, tls: None }
    }
}

/// Why a register can't be set up. A server that can't be reached is no reason: that is an outcome.
#[derive(Debug, Error)]
pub enum RegisterSetupError {
    /// The file.
    #[error(transparent)]
    File(#[from] RegisterError),
    /// The URL's options.
    #[error("register_url: {0}")]
    Url(#[from] RegisterUrlError),
    /// The certificates or the key.
    #[error("register_tls: {0}")]
    Tls(#[from] TlsError),
    /// This build has no etcd.
    #[error(
        "register_not_built: this build has no etcd: `cargo build --features etcd`, which needs protoc"
    )]
    NoEtcd,
}

/// An open register.
#[derive(Debug)]
pub enum Register {
    /// In the data directory.
    File(FileRegister),
    /// Somewhere else on this machine.
    SharedFile(SharedFileRegister),
    /// A row.
    Postgres(PostgresRegister),
    /// A key.
    #[cfg(feature = "etcd")]
    Etcd(Box<EtcdRegister>),
}

impl Register {
    /// Opens the file, or reads the certificates that a server needs. Connects to nothing.
    ///
    /// # Errors
    /// See [`RegisterSetupError`].
    pub fn open(options: &RegisterOptions, directory: &Path) -> Result<Self, RegisterSetupError> {
        Ok(match &options.url {
            RegisterUrl::File => Self::File(FileRegister::open(&directory.join("register"))?),
            RegisterUrl::SharedFile(path) => Self::SharedFile(SharedFileRegister::open(path)?),
            RegisterUrl::Postgres(url) => Self::Postgres(PostgresRegister::new(url, options)?),
            #[cfg(feature = "etcd")]
            RegisterUrl::Etcd(url) => Self::Etcd(Box::new(EtcdRegister::new(url, options)?)),
            #[cfg(not(feature = "etcd"))]
            RegisterUrl::Etcd(_) => return Err(RegisterSetupError::NoEtcd),
        })
    }

    /// Carries out one operation. A file blocks the thread while its disk writes. Dropped before its end, a
    /// compare-and-set may or may not have happened, as after [`RegisterOutcome::Indeterminate`].
    pub async fn apply(&mut self, op: RegisterOp) -> RegisterOutcome {
        if let RegisterOp::Cas { value, .. } = &op {
            let bytes = value.len();
            assert!(bytes <= REGISTER_BYTES_MAX, "{bytes} bytes are over {REGISTER_BYTES_MAX}");
        }
        match self {
            Self::File(register) => register.apply(op),
            Self::SharedFile(register) => register.apply(op).await,
            Self::Postgres(register) => register.apply(op).await,
            #[cfg(feature = "etcd")]
            Self::Etcd(register) => register.apply(op).await,
        }
    }
}

/// An error with its causes, in one line.
fn describe(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        let cause_text = cause.to_string();
        if !text.ends_with(&cause_text) {
            text = format!("{text}: {cause_text}");
        }
        source = cause.source();
    }
    text
}
