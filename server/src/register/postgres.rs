//! The register as one row of a PostgreSQL database.
//!
//! ```text
//! millrace_register      name text primary key | revision bigint, from 1 | value bytea
//!
//! read                   SELECT revision, value WHERE name = me           no row: revision 0
//! cas at 0               INSERT (me, 1, value) ON CONFLICT DO NOTHING     1 row: written, 0: lost
//! cas at r               UPDATE ... SET revision = r + 1
//!                               WHERE name = me AND revision = r          1 row: written, 0: lost
//! ```
//!
//! One statement is one transaction, and its commit comes after the count of rows: only `ReadyForQuery`,
//! which tokio-postgres waits for, makes the count a fact. A statement that the server refuses with an
//! ERROR was rolled back; a FATAL may come after the commit. A server that is read-only (a standby would be
//! behind) is not connected to.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use common::quic::tls::{self, TlsError};
use common::register::{RegisterOp, RegisterOutcome, Revision};
use rustls::ClientConfig;
use tokio::task::JoinHandle;
use tokio::time::{Instant, timeout_at};
use tokio_postgres::config::{LoadBalanceHosts, SslMode, TargetSessionAttrs};
use tokio_postgres::error::{Severity, SqlState};
use tokio_postgres::types::Type;
use tokio_postgres::{Client, Config, Error, NoTls};
use tokio_postgres_rustls::MakeRustlsConnect;

use super::url::RegisterUrlError;
use super::{RegisterOptions, RegisterSetupError, RegisterTls, ServerUrl, describe};

/// How often a read is tried: the first connection may have been dead for long.
const READ_ATTEMPTS: usize = 2;

const FIND_TABLE: &str = "SELECT to_regclass('millrace_register') IS NOT NULL";
const MAKE_TABLE: &str = "CREATE TABLE IF NOT EXISTS millrace_register \
     (name text PRIMARY KEY, revision bigint NOT NULL, value bytea NOT NULL)";
/// What was acknowledged must survive a crash, whatever the role's or database's default. A time-out of the
/// server's would only blur what became of a statement.
const SETTINGS: &str = "SELECT set_config('statement_timeout', '0', false), CASE \
     current_setting('synchronous_commit') WHEN 'off' THEN \
     set_config('synchronous_commit', 'on', false) END";
const READ: &str = "SELECT revision, value FROM millrace_register WHERE name = $1";
const FIRST_WRITE: &str = "INSERT INTO millrace_register (name, revision, value) \
     VALUES ($1, $2, $3) ON CONFLICT (name) DO NOTHING";
const WRITE: &str = "UPDATE millrace_register SET revision = $2, value = $3 \
     WHERE name = $1 AND revision = $2 - 1";

/// A register in PostgreSQL.
pub struct PostgresRegister {
    config: Config,
    tls: Option<MakeRustlsConnect>,
    name: String,
    timeout: Duration,
    link: Option<Link>,
}

/// A connection and the task that drives it.
struct Link {
    client: Client,
    driver: JoinHandle<()>,
}

impl Drop for Link {
    fn drop(&mut self) {
        self.driver.abort();
    }
}

impl fmt::Debug for PostgresRegister {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PostgresRegister").field("name", &self.name).finish_non_exhaustive()
    }
}

impl PostgresRegister {
    /// Reads the certificates. Connects at the first question.
    ///
    /// # Errors
    /// See [`RegisterSetupError`].
    pub fn new(url: &ServerUrl, own: &RegisterOptions) -> Result<Self, RegisterSetupError> {
        check_sslmode(url.options.get("sslmode").map(String::as_str), own.tls.is_some())?;
        let tls = own.tls.as_ref().map(make_tls).transpose()?;
        let mut config = Config::new();
        for (host, port) in &url.hosts {
            config.host(host).port(*port);
        }
        if let Some(directory) = url.options.get("host").filter(|_| url.hosts.is_empty()) {
            config.host(directory);
        }
        if let Some(user) = &url.user {
            config.user(user);
        }
        if let Some(password) = own.password.as_ref().or(url.password.as_ref()) {
            config.password(password.reveal());
        }
        if !url.path.is_empty() {
            config.dbname(&url.path);
        }
        let application = url.options.get("application_name").map_or("millrace", String::as_str);
        config
            .application_name(application)
            .ssl_mode(if tls.is_some() { SslMode::Require } else { SslMode::Disable })
            .target_session_attrs(TargetSessionAttrs::ReadWrite);
        let timeout = url.timeout()?;
        let hosts = u32::try_from(url.hosts.len().max(1)).expect("a few hosts");
        // One that takes no connection leaves time for the others. One that takes it and then says nothing
        // does not: then another goes first the next time.
        config.connect_timeout(timeout / hosts).load_balance_hosts(LoadBalanceHosts::Random);
        Ok(Self { config, tls, name: own.cluster.clone(), timeout, link: None })
    }

    /// Carries out one operation.
    pub async fn apply(&mut self, op: RegisterOp) -> RegisterOutcome {
        let deadline = Instant::now() + self.timeout;
        match op {
            RegisterOp::Read => self.read(deadline).await,
            RegisterOp::Cas { expect, value } => self.write(deadline, expect, &value).await,
        }
    }

    async fn read(&mut self, deadline: Instant) -> RegisterOutcome {
        let mut failure = String::new();
        for _ in 0..READ_ATTEMPTS {
            match timeout_at(deadline, self.read_once()).await {
                Ok(Ok((revision, value))) => return RegisterOutcome::Value(revision, value),
                Ok(Err(error)) => failure = describe(&error),
                Err(_) => failure = self.silence(),
            }
            self.link = None;
        }
        RegisterOutcome::Unavailable(failure)
    }

    async fn read_once(&mut self) -> Result<(Revision, Bytes), Error> {
        let name = self.name.clone();
        let client = self.connect().await?;
        let rows = client.query_typed(READ, &[(&name, Type::TEXT)]).await?;
        let Some(row) = rows.first() else { return Ok((Revision(0), Bytes::new())) };
        let (revision, value): (i64, &[u8]) = (row.try_get(0)?, row.try_get(1)?);
        let revision = u64::try_from(revision).unwrap_or_default();
        Ok((Revision(revision), Bytes::copy_from_slice(value)))
    }

    async fn write(
        &mut self,
        deadline: Instant,
        expect: Revision,
        value: &[u8],
    ) -> RegisterOutcome {
        // A revision that the column can't hold was never written.
        let Some(next) = i64::try_from(expect.0).ok().and_then(|revision| revision.checked_add(1))
        else {
            return RegisterOutcome::Lost;
        };
        let (name, silence) = (self.name.clone(), self.silence());
        let client = match timeout_at(deadline, self.connect()).await {
            Ok(Ok(client)) => client,
            Ok(Err(error)) => return RegisterOutcome::Unavailable(describe(&error)),
            Err(_) => return RegisterOutcome::Unavailable(silence),
        };
        // From here on the statement may be on its way.
        let statement = if expect == Revision(0) { FIRST_WRITE } else { WRITE };
        let values: [(&(dyn tokio_postgres::types::ToSql + Sync), Type); 3] =
            [(&name, Type::TEXT), (&next, Type::INT8), (&value, Type::BYTEA)];
        let outcome = match timeout_at(deadline, client.execute_typed(statement, &values)).await {
            Ok(Ok(0)) => return RegisterOutcome::Lost,
            Ok(Ok(1)) => return RegisterOutcome::Written(Revision(expect.0 + 1)),
            Ok(Ok(rows)) => RegisterOutcome::Indeterminate(format!("{rows} rows have one name")),
            Ok(Err(error)) if is_rolled_back(&error) => {
                RegisterOutcome::Unavailable(describe(&error))
            }
            Ok(Err(error)) => RegisterOutcome::Indeterminate(describe(&error)),
            Err(_) => RegisterOutcome::Indeterminate(silence),
        };
        self.link = None;
        outcome
    }

    /// A connection that was alive a moment ago, with the table in place.
    async fn connect(&mut self) -> Result<&Client, Error> {
        let link = match self.link.take().filter(|link| !link.client.is_closed()) {
            Some(link) => link,
            None => {
                let link = match self.tls.clone() {
                    Some(tls) => Link::drive(self.config.connect(tls).await?),
                    None => Link::drive(self.config.connect(NoTls).await?),
                };
                prepare(&link.client).await?;
                link
            }
        };
        Ok(&self.link.insert(link).client)
    }

    fn silence(&self) -> String {
        format!("no answer within {} ms", self.timeout.as_millis())
    }
}

/// `sslmode` comes along with URLs that are made for other clients. It may say again what is so anyway.
fn check_sslmode(mode: Option<&str>, has_tls: bool) -> Result<(), RegisterUrlError> {
    let rule = match (mode, has_tls) {
        (None, _) | (Some("disable"), false) | (Some("require" | "verify-full"), true) => {
            return Ok(());
        }
        (Some("require" | "verify-full"), false) => "needs --register-tls-ca",
        (Some("disable"), true) => "contradicts --register-tls-ca",
        (Some(_), _) => "disable, or require or verify-full, which are the same here",
    };
    Err(RegisterUrlError::Value { name: "sslmode", rule })
}

/// rustls with ring, as everywhere else; the server's certificate is always verified, its name included.
fn make_tls(files: &RegisterTls) -> Result<MakeRustlsConnect, TlsError> {
    let path = files.identity.as_ref().map_or(&files.ca, |identity| &identity.certificate);
    let unusable =
        |error: rustls::Error| TlsError::Unusable { path: path.clone(), why: error.to_string() };
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(unusable)?
        .with_root_certificates(tls::roots(&files.ca)?);
    let config = match &files.identity {
        None => builder.with_no_client_auth(),
        Some(identity) => builder
            .with_client_auth_cert(
                tls::certificates(&identity.certificate)?,
                tls::key(&identity.key)?,
            )
            .map_err(unusable)?,
    };
    Ok(MakeRustlsConnect::new(config))
}

impl Link {
    fn drive<T>(
        (client, connection): (Client, tokio_postgres::Connection<tokio_postgres::Socket, T>),
    ) -> Self
    where
        T: tokio_postgres::tls::TlsStream + Unpin + Send + 'static,
    {
        // How the connection ends is told to whoever waits for an answer.
        let driver = tokio::spawn(async move {
            let _ = connection.await;
        });
        Self { client, driver }
    }
}

async fn prepare(client: &Client) -> Result<(), Error> {
    client.query_typed(SETTINGS, &[]).await?;
    let has_table: bool = client.query_typed_one(FIND_TABLE, &[]).await?.try_get(0)?;
    if has_table {
        return Ok(());
    }
    match client.execute_typed(MAKE_TABLE, &[]).await {
        // Two that make it at once collide in the catalog.
        Err(error)
            if [Some(&SqlState::UNIQUE_VIOLATION), Some(&SqlState::DUPLICATE_TABLE)]
                .contains(&error.code()) =>
        {
            Ok(())
        }
        made => made.map(|_| ()),
    }
}

/// Whether the server has said that it did not do it: an ERROR (not a FATAL) of a class that comes up
/// before the commit. Canceling and shutting down are not among them.
fn is_rolled_back(error: &Error) -> bool {
    const CLASSES: [&str; 9] = ["22", "23", "25", "26", "28", "40", "42", "53", "55"];
    let Some(error) = error.as_db_error() else { return false };
    let class = error.code().code().get(..2).unwrap_or_default();
    error.parsed_severity() == Some(Severity::Error)
        && CLASSES.contains(&class)
        && *error.code() != SqlState::T_R_STATEMENT_COMPLETION_UNKNOWN
}
