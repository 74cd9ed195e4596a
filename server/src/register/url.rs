//! Which register: a URL, taken apart without ever repeating its password.
//!
//! ```text
//! file                                                        the data directory's own (the default)
//! file:///path/of/a/file                                      shared by the nodes of one machine
//! postgres://user:password@host:port,host/database?timeout_ms=500
//! etcd://user:password@host:port,host:port/prefix?servername=etcd
//!            `--- Secret: printed as *** in every form
//! ```
//!
//! Errors name the place and the rule, never the text: where a password was not percent-encoded, any part
//! of the URL may be a piece of it.

use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use thiserror::Error;

/// Servers that one URL may name.
const HOSTS_MAX: usize = 16;
/// The time that a question may take, if the URL does not say: see [`ServerUrl::timeout`].
pub const ANSWER_TIMEOUT: Duration = Duration::from_secs(2);
const ANSWER_TIMEOUT_MS: core::ops::RangeInclusive<u64> = 50..=60_000;

/// Something that must not be printed.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(String);

impl Secret {
    /// The text itself: only for whom it is meant.
    #[must_use]
    pub fn reveal(&self) -> &str {
        &self.0
    }
}

impl From<String> for Secret {
    fn from(text: String) -> Self {
        Self(text)
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("***")
    }
}

/// Where the register is.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub enum RegisterUrl {
    /// In the data directory.
    #[default]
    File,
    /// A file that the nodes of one machine share.
    SharedFile(PathBuf),
    /// A row of a PostgreSQL database.
    Postgres(ServerUrl),
    /// A key of an etcd cluster.
    Etcd(ServerUrl),
}

/// The parts of a URL with servers.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ServerUrl {
    /// Who asks.
    pub user: Option<String>,
    /// What proves it.
    pub password: Option<Secret>,
    /// Servers in the order in which they are tried. None if the socket's directory is an option.
    pub hosts: Vec<(String, u16)>,
    /// What follows the servers, without its slash: a database, a prefix of keys.
    pub path: String,
    /// `name=value` after the question mark; only names that the register knows.
    pub options: BTreeMap<String, String>,
}

/// What is wrong with a register's URL.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
pub enum RegisterUrlError {
    /// Neither `file` nor a scheme that is known.
    #[error("a register is file, file:///PATH, postgres://... or etcd://...")]
    Scheme,
    /// A reserved character stands where it can't be told from a part of the password.
    #[error("@ : / ? # and % in a register's user and password must be percent-encoded")]
    Encoding,
    /// No server, or too many, or one without a name or with a port that is no number.
    #[error("a register's servers are host or host:port, by commas, {} at most", HOSTS_MAX)]
    Hosts,
    /// A path that is not absolute: nodes may start in different directories.
    #[error("a register's path begins with a slash: file:///PATH")]
    Path,
    /// An option that this register does not have.
    #[error("a register of this kind has no option {0:?}")]
    Option(String),
    /// An option's value makes no sense.
    #[error("a register's option {name}: {rule}")]
    Value {
        /// The option.
        name: &'static str,
        /// What it may be.
        rule: &'static str,
    },
}

/// What both kinds have.
const COMMON_OPTIONS: &[&str] = &["timeout_ms"];
/// PostgreSQL's own names.
const POSTGRES_OPTIONS: &[&str] = &["application_name", "host", "sslmode"];
/// What a server's certificate is for, where it is not for its host.
const ETCD_OPTIONS: &[&str] = &["servername"];

const POSTGRES_PORT: u16 = 5432;
const ETCD_PORT: u16 = 2379;

impl FromStr for RegisterUrl {
    type Err = RegisterUrlError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        if text == "file" {
            return Ok(Self::File);
        }
        let (scheme, rest) = text.split_once("://").ok_or(RegisterUrlError::Scheme)?;
        match scheme {
            "file" if rest.starts_with('/') && rest.len() > 1 => {
                Ok(Self::SharedFile(PathBuf::from(decode(rest)?)))
            }
            "file" => Err(RegisterUrlError::Path),
            "postgres" | "postgresql" => {
                ServerUrl::parse(rest, POSTGRES_PORT, POSTGRES_OPTIONS).map(Self::Postgres)
            }
            "etcd" => ServerUrl::parse(rest, ETCD_PORT, ETCD_OPTIONS).map(Self::Etcd),
            _ => Err(RegisterUrlError::Scheme),
        }
    }
}

impl RegisterUrl {
    /// One word, for status and metrics.
    #[must_use]
    pub const fn kind(&self) -> &'static str {
        match self {
            Self::File => "file",
            Self::SharedFile(_) => "shared_file",
            Self::Postgres(_) => "postgres",
            Self::Etcd(_) => "etcd",
        }
    }
}

impl fmt::Display for RegisterUrl {
    /// The URL without password and options.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File => f.write_str("file"),
            Self::SharedFile(path) => write!(f, "file://{}", path.display()),
            Self::Postgres(url) | Self::Etcd(url) => write!(f, "{}://{url}", self.kind()),
        }
    }
}

impl ServerUrl {
    fn parse(rest: &str, port: u16, known: &[&str]) -> Result<Self, RegisterUrlError> {
        let (place, query) = rest.split_once('?').unwrap_or((rest, ""));
        let (authority, path) = place.split_once('/').unwrap_or((place, ""));
        // An @ or # out here means that the authority was cut off within a password.
        if [query, path].iter().any(|part| part.contains(['@', '#', '?'])) {
            return Err(RegisterUrlError::Encoding);
        }
        let (credentials, hosts) = match authority.rsplit_once('@') {
            Some((credentials, hosts)) => (Some(credentials), hosts),
            None => (None, authority),
        };
        let (mut user, mut password) = (None, None);
        if let Some(credentials) = credentials {
            let (name, secret) = match credentials.split_once(':') {
                Some((name, secret)) => (name, Some(secret)),
                None => (credentials, None),
            };
            user = Some(decode(name)?);
            password = secret.map(decode).transpose()?.map(Secret);
        }
        let mut options = BTreeMap::new();
        for pair in query.split('&').filter(|pair| !pair.is_empty()) {
            let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
            if !known.contains(&name) && !COMMON_OPTIONS.contains(&name) {
                return Err(RegisterUrlError::Option(name.to_owned()));
            }
            options.insert(name.to_owned(), decode(value)?);
        }
        let url =
            Self { user, password, hosts: parse_hosts(hosts, port)?, path: decode(path)?, options };
        if url.hosts.is_empty() && !url.options.contains_key("host") {
            return Err(RegisterUrlError::Hosts);
        }
        url.timeout()?;
        Ok(url)
    }

    /// The time that one question may take from end to end, connecting included: the option `timeout_ms`.
    ///
    /// # Errors
    /// When it is no number, or out of its range.
    pub fn timeout(&self) -> Result<Duration, RegisterUrlError> {
        let Some(text) = self.options.get("timeout_ms") else { return Ok(ANSWER_TIMEOUT) };
        let number = text.parse().ok().filter(|number| ANSWER_TIMEOUT_MS.contains(number));
        let rule = "milliseconds, 50 to 60000";
        number
            .map(Duration::from_millis)
            .ok_or(RegisterUrlError::Value { name: "timeout_ms", rule })
    }
}

impl fmt::Display for ServerUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(user) = &self.user {
            write!(f, "{user}@")?;
        }
        for (n, (host, port)) in self.hosts.iter().enumerate() {
            let comma = if n > 0 { "," } else { "" };
            write!(f, "{comma}{}:{port}", Bracketed(host))?;
        }
        if let Some(directory) = self.options.get("host").filter(|_| self.hosts.is_empty()) {
            f.write_str(directory)?;
        }
        write!(f, "/{}", self.path)
    }
}

/// A host as URLs have it: an IPv6 address in brackets.
pub(super) struct Bracketed<'a>(pub(super) &'a str);

impl fmt::Display for Bracketed<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.contains(':') { write!(f, "[{}]", self.0) } else { f.write_str(self.0) }
    }
}

fn parse_hosts(text: &str, default_port: u16) -> Result<Vec<(String, u16)>, RegisterUrlError> {
    if text.is_empty() {
        return Ok(Vec::new());
    }
    let hosts: Vec<_> = text.split(',').map(|host| parse_host(host, default_port)).collect();
    if hosts.len() > HOSTS_MAX {
        return Err(RegisterUrlError::Hosts);
    }
    hosts.into_iter().collect::<Option<_>>().ok_or(RegisterUrlError::Hosts)
}

fn parse_host(text: &str, default_port: u16) -> Option<(String, u16)> {
    let (host, port) = match text.strip_prefix('[') {
        Some(rest) => rest.split_once(']')?,
        None => text.split_at(text.find(':').unwrap_or(text.len())),
    };
    let is_name = |byte: u8| byte.is_ascii_alphanumeric() || b".-_:".contains(&byte);
    if host.is_empty() || !host.bytes().all(is_name) {
        return None;
    }
    let port = match port {
        "" => default_port,
        port => port.strip_prefix(':')?.parse().ok()?,
    };
    Some((host.to_owned(), port))
}

fn decode(text: &str) -> Result<String, RegisterUrlError> {
    let mut out = Vec::with_capacity(text.len());
    let mut rest = text.bytes();
    while let Some(byte) = rest.next() {
        let byte = match byte {
            b'%' => {
                let mut digit = || rest.next().and_then(|byte| char::from(byte).to_digit(16));
                let (high, low) = (digit(), digit());
                let pair = high.zip(low).ok_or(RegisterUrlError::Encoding)?;
                u8::try_from(pair.0 << 4 | pair.1).expect("two hex digits")
            }
            b'@' | b'?' | b'#' => return Err(RegisterUrlError::Encoding),
            byte => byte,
        };
        out.push(byte);
    }
    // A zero ends strings in the protocols of both.
    let text = String::from_utf8(out).map_err(|_| RegisterUrlError::Encoding)?;
    if text.contains('\0') { Err(RegisterUrlError::Encoding) } else { Ok(text) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn server(text: &str) -> ServerUrl {
        match text.parse().unwrap() {
            RegisterUrl::Postgres(url) | RegisterUrl::Etcd(url) => url,
            RegisterUrl::File | RegisterUrl::SharedFile(_) => panic!("{text} is no file"),
        }
    }

    #[test]
    fn urls_are_taken_apart() {
        assert_eq!("file".parse(), Ok(RegisterUrl::File));
        let shared = RegisterUrl::SharedFile(PathBuf::from("/var/lib/a b"));
        assert_eq!("file:///var/lib/a%20b".parse(), Ok(shared));
        assert_eq!("file://var".parse::<RegisterUrl>(), Err(RegisterUrlError::Path));
        let url = server(
            "postgres://me:p%40ss%3A%2f@db,[::1]:77/logs?application_name=a%2Fb&timeout_ms=90",
        );
        assert_eq!(url.user.as_deref(), Some("me"));
        assert_eq!(url.password.as_ref().map(Secret::reveal), Some("p@ss:/"));
        assert_eq!(url.hosts, [("db".to_owned(), 5432), ("::1".to_owned(), 77)]);
        assert_eq!((url.path.as_str(), url.options["application_name"].as_str()), ("logs", "a/b"));
        assert_eq!(url.timeout(), Ok(Duration::from_millis(90)));
        let url = server("etcd://a:1,b");
        assert_eq!(url.hosts, [("a".to_owned(), 1), ("b".to_owned(), 2379)]);
        assert_eq!((url.user, url.path.as_str()), (None, ""));
        assert_eq!(server("postgres:///logs?host=%2Frun").hosts, []);
    }

    #[test]
    fn nothing_printed_holds_the_password() {
        let text = "postgres://me:hunter2@db:5/logs?application_name=hunter2";
        let url: RegisterUrl = text.parse().unwrap();
        assert_eq!(url.to_string(), "postgres://me@db:5/logs");
        assert_eq!(format!("{:?}", server("etcd://me:hunter2@db").password), "Some(***)");
        // However wrong the URL is, its error repeats nothing of it but an option's name.
        for wrong in [
            "hunter2",
            "http://me:hunter2@db",
            "postgres://me:hun/ter2@db",
            "postgres://me:hun?ter2@db",
            "postgres://me:hun#ter2@db/x",
            "postgres://me:12/ter2@db",
            "postgres://me:hun%ter2@db",
            "postgres://me:x@db:hunter2",
            "postgres://me:x@hunter2 db",
            "postgres://me:x@/hunter2",
            "etcd://db?timeout_ms=hunter2",
            "etcd://db?timeout_ms=10",
            "etcd://a@b/hun?@ter2",
            "etcd://me:x@db/hun%00ter2",
        ] {
            let error = wrong.parse::<RegisterUrl>().expect_err(wrong);
            assert!(!error.to_string().contains("ter2"), "{error}");
        }
        assert_eq!(
            "etcd://db?sslmode=disable".parse::<RegisterUrl>(),
            Err(RegisterUrlError::Option("sslmode".to_owned()))
        );
    }
}
