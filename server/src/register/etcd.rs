//! The register as one key of an etcd cluster.
//!
//! ```text
//! key        <prefix>/<cluster>, the prefix being the URL's path
//! revision   the key's version: 0 while there is none, then one more with each put
//!
//! read       get, linearizable
//! cas at r   get: another version than r is a loss already; it proves that the server is there
//!            txn if version(key) = r then put      succeeded: written, not: lost
//! ```
//!
//! A channel of etcd-client holds requests back until it has a connection, and does not tell whether one
//! has left when it fails. So the get comes first: what fails before it has answered was not carried out,
//! and what fails after it perhaps was. One server is asked at a time, the others when it fails.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use bytes::Bytes;
use common::quic::tls::{self, Identity, TlsError};
use common::register::{RegisterOp, RegisterOutcome, Revision};
use etcd_client::{
    Certificate, Client, Compare, CompareOp, ConnectOptions, Error, TlsOptions, Txn, TxnOp,
};
use tokio::net::TcpStream;
use tokio::time::{Instant, timeout_at};

use super::url::{Bracketed, Secret};
use super::{RegisterOptions, RegisterSetupError, ServerUrl, describe};

/// How often a lone server is tried: the first connection may have been dead for long.
const ATTEMPTS_MIN: usize = 2;
/// What etcd says where it has not carried a request out and never will. Its other answers, above all
/// "request timed out", leave that open; so does whatever a connection or something between says.
const REFUSALS: [&str; 8] = [
    "etcdserver: request is too large",
    "etcdserver: too many requests",
    "etcdserver: mvcc: database space exceeded",
    "etcdserver: no leader",
    "etcdserver: permission denied",
    "etcdserver: invalid auth token",
    "etcdserver: user name is empty",
    "etcdserver: user name not found",
];

/// A register in etcd.
pub struct EtcdRegister {
    endpoints: Vec<Endpoint>,
    /// The server that is asked first: the last one that answered.
    first: usize,
    options: ConnectOptions,
    key: String,
    timeout: Duration,
    client: Option<Client>,
}

struct Endpoint {
    url: String,
    host: String,
    port: u16,
}

impl fmt::Debug for EtcdRegister {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EtcdRegister").field("key", &self.key).finish_non_exhaustive()
    }
}

impl EtcdRegister {
    /// Reads the certificates. Connects at the first question.
    ///
    /// # Errors
    /// See [`RegisterSetupError`].
    pub fn new(url: &ServerUrl, own: &RegisterOptions) -> Result<Self, RegisterSetupError> {
        let tls = tls_options(url, own)?;
        let scheme = if tls.is_some() { "https" } else { "http" };
        let endpoints = url.hosts.iter().map(|(host, port)| Endpoint {
            url: format!("{scheme}://{}:{port}", Bracketed(host)),
            host: host.clone(),
            port: *port,
        });
        // A member without a leader says so at once; a token that has expired is renewed. The request that
        // was refused for its token was not carried out, so that one may be sent again.
        let mut options =
            ConnectOptions::new().with_require_leader(true).with_auto_token_refresh(true);
        if let Some(tls) = tls {
            options = options.with_tls(tls);
        }
        if let Some(user) = &url.user {
            let password = own.password.as_ref().or(url.password.as_ref());
            options = options.with_user(user, password.map_or("", Secret::reveal));
        }
        let (prefix, cluster) = (url.path.trim_matches('/'), &own.cluster);
        let key = if prefix.is_empty() { cluster.clone() } else { format!("{prefix}/{cluster}") };
        Ok(Self {
            endpoints: endpoints.collect(),
            first: 0,
            options,
            key,
            timeout: url.timeout()?,
            client: None,
        })
    }

    /// Carries out one operation.
    pub async fn apply(&mut self, op: RegisterOp) -> RegisterOutcome {
        let deadline = Instant::now() + self.timeout;
        let (revision, bytes) = match self.look(deadline).await {
            Ok(seen) => seen,
            Err(failure) => return RegisterOutcome::Unavailable(failure),
        };
        match op {
            RegisterOp::Read => RegisterOutcome::Value(revision, bytes),
            RegisterOp::Cas { expect, .. } if expect != revision => RegisterOutcome::Lost,
            RegisterOp::Cas { expect, value } => self.write(deadline, expect, value).await,
        }
    }

    /// Asks one server after the other until one answers.
    async fn look(&mut self, deadline: Instant) -> Result<(Revision, Bytes), String> {
        let attempts = self.endpoints.len().max(ATTEMPTS_MIN);
        let mut failure = String::new();
        for attempt in 0..attempts {
            let now = Instant::now();
            let left = u32::try_from(attempts - attempt).expect("a few servers");
            let share = now + deadline.saturating_duration_since(now) / left;
            failure = match timeout_at(share, self.look_once()).await {
                Ok(Ok(seen)) => return Ok(seen),
                Ok(Err(what)) => what,
                Err(_) => format!("no answer within {} ms", self.timeout.as_millis()),
            };
            self.client = None;
            self.first = (self.first + 1) % self.endpoints.len();
        }
        Err(failure)
    }

    async fn look_once(&mut self) -> Result<(Revision, Bytes), String> {
        let mut client = match self.client.take() {
            Some(client) => client,
            None => self.connect().await?,
        };
        let answer = client.get(self.key.as_str(), None).await.map_err(|error| tell(&error))?;
        self.client = Some(client);
        let Some(found) = answer.kvs().first() else { return Ok((Revision(0), Bytes::new())) };
        let version = u64::try_from(found.version()).unwrap_or_default();
        Ok((Revision(version), Bytes::copy_from_slice(found.value())))
    }

    async fn connect(&self) -> Result<Client, String> {
        let endpoint = &self.endpoints[self.first];
        // The channel would only wait: who listens there is known sooner without it.
        let socket = TcpStream::connect((endpoint.host.as_str(), endpoint.port)).await;
        drop(socket.map_err(|error| format!("{}: {error}", endpoint.url))?);
        Client::connect([&endpoint.url], Some(self.options.clone()))
            .await
            .map_err(|error| tell(&error))
    }

    async fn write(
        &mut self,
        deadline: Instant,
        expect: Revision,
        value: Bytes,
    ) -> RegisterOutcome {
        let Ok(version) = i64::try_from(expect.0) else { return RegisterOutcome::Lost };
        let key = self.key.as_str();
        let txn = Txn::new()
            .when([Compare::version(key, CompareOp::Equal, version)])
            .and_then([TxnOp::put(key, value, None)]);
        let client = self.client.as_mut().expect("a look has just succeeded");
        let outcome = match timeout_at(deadline, client.txn(txn)).await {
            Ok(Ok(answer)) if answer.succeeded() => {
                return RegisterOutcome::Written(Revision(expect.0 + 1));
            }
            Ok(Ok(_)) => return RegisterOutcome::Lost,
            Ok(Err(error)) if is_refused(&error) => RegisterOutcome::Unavailable(tell(&error)),
            Ok(Err(error)) => RegisterOutcome::Indeterminate(tell(&error)),
            Err(_) => {
                let silence = format!("no answer within {} ms", self.timeout.as_millis());
                RegisterOutcome::Indeterminate(silence)
            }
        };
        self.client = None;
        outcome
    }
}

fn tls_options(
    url: &ServerUrl,
    own: &RegisterOptions,
) -> Result<Option<TlsOptions>, RegisterSetupError> {
    let Some(files) = &own.tls else { return Ok(None) };
    let read = |path: &PathBuf| {
        std::fs::read(path)
            .map_err(|error| TlsError::Unusable { path: path.clone(), why: error.to_string() })
    };
    // So that a file that holds something else is found out at the start.
    tls::roots(&files.ca)?;
    let mut wanted = TlsOptions::new().ca_certificate(Certificate::from_pem(read(&files.ca)?));
    if let Some(Identity { certificate, key }) = &files.identity {
        tls::certificates(certificate)?;
        tls::key(key)?;
        wanted = wanted.identity(etcd_client::Identity::from_pem(read(certificate)?, read(key)?));
    }
    Ok(Some(match url.options.get("servername") {
        Some(name) => wanted.domain_name(name),
        None => wanted,
    }))
}

/// Whether etcd has said that it did not do it.
fn is_refused(error: &Error) -> bool {
    let Error::GRpcStatus(status) = error else { return false };
    REFUSALS.contains(&status.message())
}

/// An error of etcd-client in one line; a status's metadata is left out.
fn tell(error: &Error) -> String {
    match error {
        Error::GRpcStatus(status) => {
            let cause = std::error::Error::source(status).map(describe).unwrap_or_default();
            let colon = if cause.is_empty() { "" } else { ": " };
            format!("{:?}: {}{colon}{cause}", status.code(), status.message())
        }
        other => describe(other),
    }
}
