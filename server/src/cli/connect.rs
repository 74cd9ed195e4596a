//! Reaching a cluster from the command line.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};
use clap::Args;
use client::face::{Client, ConnectOptions};
use common::StreamId;
use common::quic::tls::{ClientTls, DEVELOPMENT_NAME, Development, Identity};
use serde_json::Value;

use super::cluster::DEFINITION_FILE;
use super::exit::Failure;
use super::serve::ADDRESS_FILE;
use crate::definition::Definition;
use crate::host::development_tls;

/// Where the cluster is and whom to trust.
#[derive(Args, Clone, Debug, Default)]
pub(crate) struct ConnectArgs {
    /// Addresses of nodes, `host:port`, by commas: one that answers tells where the others are.
    #[arg(long, value_name = "ADDRESS", value_delimiter = ',', env = "MILLRACE_CONNECT")]
    pub(crate) connect: Vec<String>,
    /// The directory of a node on this machine, or of `cluster start-local`: addresses and whom to trust.
    #[arg(long, value_name = "DIR", env = "MILLRACE_DIR")]
    pub(crate) dir: Option<PathBuf>,
    /// The CA that nodes have their certificate from, PEM.
    #[arg(long, value_name = "FILE", env = "MILLRACE_TLS_CA")]
    pub(crate) tls_ca: Option<PathBuf>,
    /// A client certificate, PEM, for clusters that ask for one.
    #[arg(long, value_name = "FILE", requires = "tls_key")]
    pub(crate) tls_cert: Option<PathBuf>,
    /// Its key, PEM.
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    pub(crate) tls_key: Option<PathBuf>,
    /// The name in the nodes' certificates, when it is not the host that is dialed.
    #[arg(long, value_name = "NAME")]
    pub(crate) tls_name: Option<String>,
    /// How long to wait for a first answer, seconds.
    #[arg(long, value_name = "SECONDS", default_value_t = 10)]
    pub(crate) connect_seconds: u64,
}

impl ConnectArgs {
    /// The node that runs on this directory.
    #[must_use]
    pub(crate) fn local(directory: &Path) -> Self {
        Self { dir: Some(directory.to_owned()), connect_seconds: 10, ..Self::default() }
    }

    fn addresses(&self) -> Result<Vec<String>> {
        if !self.connect.is_empty() {
            return Ok(self.connect.clone());
        }
        let Some(directory) = &self.dir else {
            let what = "say where the cluster is: --connect HOST:PORT or --dir DIR";
            return Err(Failure::usage(what).into());
        };
        if let Some(definition) = local_definition(directory)? {
            return Ok(definition.nodes.into_iter().map(|node| node.address).collect());
        }
        let file = directory.join(ADDRESS_FILE);
        let address = std::fs::read_to_string(&file).map_err(|error| {
            Failure::unavailable(format!("no node serves on {}: {error}", directory.display()))
        })?;
        Ok(vec![address.trim().to_owned()])
    }

    fn tls(&self) -> Result<ClientTls> {
        let development = |directory: &PathBuf| {
            let directory = development_tls(directory);
            // Looking must not make one.
            directory.exists().then(|| Development::open(&directory, &[])).transpose()
        };
        let mut tls = match (&self.tls_ca, &self.dir) {
            (Some(ca), _) => ClientTls {
                ca: ca.clone(),
                identity: None,
                server_name: is_development(ca).then(|| DEVELOPMENT_NAME.to_owned()),
            },
            (None, Some(directory)) if local_definition(directory)?.is_some() => {
                development_of_cluster(directory)
            }
            (None, Some(directory)) => development(directory)?
                .with_context(|| format!("no certificate in {}", directory.display()))?
                .client(),
            (None, None) => {
                return Err(Failure::usage("say whom to trust: --tls-ca FILE or --dir DIR").into());
            }
        };
        if let (Some(certificate), Some(key)) = (&self.tls_cert, &self.tls_key) {
            tls.identity = Some(Identity { certificate: certificate.clone(), key: key.clone() });
        }
        if self.tls_name.is_some() {
            tls.server_name.clone_from(&self.tls_name);
        }
        Ok(tls)
    }

    /// Connects.
    ///
    /// # Errors
    /// When it is not said where, or nobody answers.
    pub(crate) async fn open(&self) -> Result<Client> {
        let addresses = self.addresses()?;
        let options = self.options(Duration::from_secs(self.connect_seconds))?;
        Ok(Client::connect(addresses, options).await?)
    }

    /// Connects to the nodes that were named and to no others.
    ///
    /// # Errors
    /// When it is not said where, or nobody answers.
    pub(crate) async fn open_named(&self) -> Result<Client> {
        let addresses = self.addresses()?;
        let mut options = self.options(Duration::from_secs(self.connect_seconds))?;
        options.discover = false;
        Ok(Client::connect(addresses, options).await?)
    }

    /// Connects to the node at this address and to no other.
    ///
    /// # Errors
    /// When it does not answer in time.
    async fn open_only(&self, address: &str, patience: Duration) -> Result<Client> {
        let mut options = self.options(patience)?;
        options.discover = false;
        Ok(Client::connect([address], options).await?)
    }

    /// How the node at `address` stands, whatever the others say.
    pub(crate) async fn status_of(&self, address: &str, patience: Duration) -> Result<Value> {
        let client = self.open_only(address, patience).await?;
        let status = serde_json::from_str(&client.status().await?)?;
        client.close().await;
        Ok(status)
    }

    fn options(&self, patience: Duration) -> Result<ConnectOptions> {
        let mut options = ConnectOptions::new(PathBuf::new());
        options.tls = self.tls()?;
        options.connect_timeout = patience;
        Ok(options)
    }
}

/// The definition in the directory of a local cluster.
fn local_definition(directory: &Path) -> Result<Option<Definition>> {
    let file = directory.join(DEFINITION_FILE);
    if !file.exists() {
        return Ok(None);
    }
    let definition = Definition::read(&file);
    Ok(Some(definition.map_err(|error| Failure::usage(error.to_string()))?))
}

/// Whom the clients of a local cluster trust.
fn development_of_cluster(directory: &Path) -> ClientTls {
    let ca = development_tls(directory).join("ca.pem");
    ClientTls { ca, identity: None, server_name: Some(DEVELOPMENT_NAME.to_owned()) }
}

/// Whether a CA file lies in a directory of a development certificate, whose names are not real ones.
fn is_development(ca: &Path) -> bool {
    ca.file_name().is_some_and(|name| name == "ca.pem")
        && ca.parent().is_some_and(|parent| {
            parent.join("server.key").exists() || parent.join("node-1.key").exists()
        })
}

/// The stream of a name, or of an id written `s17`.
///
/// # Errors
/// [`common::Code::UnknownStream`] when there is none.
pub(crate) async fn find_stream(client: &Client, name: &str) -> Result<StreamId> {
    if let Some(id) = name.strip_prefix('s').and_then(|id| id.parse().ok()) {
        return Ok(StreamId(id));
    }
    match client.find_stream(name).await? {
        Some(stream) => Ok(stream),
        None => {
            let detail = format!("no stream is named {name:?}");
            Err(client::Error::new(common::Code::UnknownStream, detail).into())
        }
    }
}

/// Runs a verb that talks to a cluster.
///
/// # Errors
/// The verb's own.
pub(crate) fn block_on<T>(run: impl Future<Output = Result<T>>) -> Result<T> {
    tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(run)
}
