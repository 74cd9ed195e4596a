//! The definition of a cluster: a TOML file that every node is started with.
//!
//! ```text
//! cluster = "blue"                          all nodes and the register know it by this name
//! register = "postgres://millrace@db/log"   or etcd://..., or file:///PATH for nodes of one machine
//! leaders = [1, 2, 3]                       who may lead; the sequencer lives with the leader
//! proxies = [1, 2]                          a proxy for each entry
//! resolvers = [{ node = 1 }, { node = 2, begin = "m" }]    shares of the key space, in order
//! log_servers = [1, 2, 3]                   in the order of placement
//! replication = 2                           copies of each stream
//! ca = "tls/ca.pem"                         whose certificates make a node; paths are relative to this file
//!
//! [[nodes]]
//! id = 1
//! address = "10.0.0.1:7070"                 where nodes and clients connect
//! label = "rack a"                          what fails together; optional
//! tls_name = "node-1"                       the name in its certificate; the host of `address` if not said
//! certificate = "tls/node-1.pem"            what it shows; or `millrace serve --tls-cert --tls-key`
//! key = "tls/node-1.key"
//! ```
//!
//! It is static: who changes it stops all nodes first. Every mistake has a code, which its message begins
//! with.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use common::message::NodeAddress;
use common::quic;
use common::{NodeId, quic::tls::Identity};
use sequencer::leader::Topology;
use serde::Deserialize;
use thiserror::Error;

use crate::register::{RegisterUrl, RegisterUrlError};

/// Nodes of a cluster.
pub const NODES_MAX: usize = 64;
/// Proxies, and resolvers: their places travel as one byte.
pub const ROLES_MAX: usize = 64;
/// Bytes of a cluster's name and of a label.
pub const NAME_BYTES_MAX: usize = 128;
/// Ids of clients are drawn from above.
pub const NODE_ID_MAX: u64 = 1 << 32;

/// A checked definition.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Definition {
    /// The cluster's name.
    pub cluster: String,
    /// Where its register is.
    pub register: RegisterUrl,
    /// The CA of the nodes' certificates, PEM.
    pub ca: PathBuf,
    /// All nodes.
    pub nodes: Vec<DefinedNode>,
    /// Who plays which role.
    pub topology: Topology,
}

/// A node of a definition.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct DefinedNode {
    /// The node.
    pub id: NodeId,
    /// `host:port`.
    pub address: String,
    /// What fails together has one label.
    pub label: String,
    /// The name that its certificate must have.
    pub tls_name: String,
    /// What it shows.
    pub identity: Option<Identity>,
}

/// What is wrong with a definition.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
#[non_exhaustive]
pub enum DefinitionError {
    /// The file can't be read.
    #[error("cluster_file: {0}")]
    File(String),
    /// No TOML, a key that is unknown or missing, or a value of another type.
    #[error("cluster_syntax: {0}")]
    Syntax(String),
    /// The cluster's name.
    #[error("cluster_name: a cluster's name has 1 to {NAME_BYTES_MAX} bytes and no slash")]
    Name,
    /// No nodes, or too many.
    #[error("cluster_node_count: {0} nodes; a cluster has 1 to {NODES_MAX}")]
    NodeCount(usize),
    /// An id that is out of range or taken.
    #[error("cluster_node_id: {0}: ids are 1 to {NODE_ID_MAX}, each once")]
    NodeId(u64),
    /// An address that is none or taken.
    #[error("cluster_node_address: {0}: an address is host:port, each once")]
    Address(String),
    /// A label that is too long, or a TLS name that is none.
    #[error("cluster_node_name: {0}")]
    NodeName(String),
    /// A certificate without a key, or the other way round.
    #[error("cluster_node_certificate: {0}: a certificate comes with its key")]
    Certificate(NodeId),
    /// A role is given to a node that is not there.
    #[error("cluster_unknown_node: {role}: there is no node {id}")]
    UnknownNode {
        /// The key of the role.
        role: &'static str,
        /// Who is not there.
        id: u64,
    },
    /// Nobody may lead, or somebody twice.
    #[error("cluster_leaders: at least one node leads, and each is named once")]
    Leaders,
    /// No proxy, or too many.
    #[error("cluster_proxies: {0}; there are 1 to {ROLES_MAX}")]
    Proxies(usize),
    /// No resolver, too many, or shares that do not cover the key space in order.
    #[error(
        "cluster_resolvers: 1 to {ROLES_MAX}, the first without `begin`, then in ascending order"
    )]
    Resolvers,
    /// No log server, or one twice.
    #[error("cluster_log_servers: at least one, and each node once")]
    LogServers,
    /// More copies than log servers, or none.
    #[error("cluster_replication: {0} copies on {1} log servers")]
    Replication(u64, usize),
    /// The register's URL.
    #[error("cluster_register: {0}")]
    Register(#[from] RegisterUrlError),
    /// A register that only one node can reach.
    #[error("cluster_register: `file` is for a node alone: file:///PATH, postgres:// or etcd://")]
    RegisterNotShared,
    /// A node that is started is not in the file.
    #[error("cluster_this_node: there is no node {0} in this cluster")]
    ThisNode(u64),
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Raw {
    cluster: String,
    register: String,
    leaders: Vec<u64>,
    proxies: Vec<u64>,
    resolvers: Vec<RawResolver>,
    log_servers: Vec<u64>,
    replication: u64,
    ca: PathBuf,
    nodes: Vec<RawNode>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawResolver {
    node: u64,
    #[serde(default)]
    begin: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawNode {
    id: u64,
    address: String,
    #[serde(default)]
    label: String,
    tls_name: Option<String>,
    certificate: Option<PathBuf>,
    key: Option<PathBuf>,
}

impl Definition {
    /// Reads and checks a file.
    ///
    /// # Errors
    /// The first mistake; see [`DefinitionError`].
    pub fn read(path: &Path) -> Result<Self, DefinitionError> {
        let text = std::fs::read_to_string(path)
            .map_err(|error| DefinitionError::File(format!("{}: {error}", path.display())))?;
        Self::parse(&text, path.parent().unwrap_or(Path::new("")))
    }

    /// Checks a definition whose paths are relative to `directory`.
    ///
    /// # Errors
    /// The first mistake; see [`DefinitionError`].
    pub fn parse(text: &str, directory: &Path) -> Result<Self, DefinitionError> {
        let raw: Raw = toml::from_str(text).map_err(|error| {
            // Not the line itself: it may be the one with the register's password.
            let line = error.span().map_or(0, |span| text[..span.start].matches('\n').count() + 1);
            DefinitionError::Syntax(format!("line {line}: {}", error.message()))
        })?;
        if !is_name(&raw.cluster) || raw.cluster.contains(['/', '\0']) {
            return Err(DefinitionError::Name);
        }
        let register: RegisterUrl = raw.register.parse()?;
        if register == RegisterUrl::File {
            return Err(DefinitionError::RegisterNotShared);
        }
        let nodes = nodes(raw.nodes, directory)?;
        let known: BTreeSet<u64> = nodes.iter().map(|node| node.id.0).collect();
        let ids = |role: &'static str, ids: &[u64]| match ids.iter().find(|id| !known.contains(id))
        {
            Some(id) => Err(DefinitionError::UnknownNode { role, id: *id }),
            None => Ok(ids.iter().copied().map(NodeId).collect::<Vec<_>>()),
        };
        let candidates = ids("leaders", &raw.leaders)?;
        if candidates.is_empty() || has_twins(&candidates) {
            return Err(DefinitionError::Leaders);
        }
        let proxies = ids("proxies", &raw.proxies)?;
        if !(1..=ROLES_MAX).contains(&proxies.len()) {
            return Err(DefinitionError::Proxies(proxies.len()));
        }
        let resolving: Vec<u64> = raw.resolvers.iter().map(|resolver| resolver.node).collect();
        let resolving = ids("resolvers", &resolving)?;
        let begins = raw.resolvers.into_iter().map(|resolver| resolver.begin.into_bytes());
        let resolvers: Vec<(NodeId, Vec<u8>)> = resolving.into_iter().zip(begins).collect();
        let is_first_whole = resolvers.first().is_some_and(|(_, begin)| begin.is_empty());
        let is_in_order = resolvers.windows(2).all(|pair| pair[0].1 < pair[1].1);
        if !is_first_whole || !is_in_order || resolvers.len() > ROLES_MAX {
            return Err(DefinitionError::Resolvers);
        }
        let log_servers = ids("log_servers", &raw.log_servers)?;
        if log_servers.is_empty() || has_twins(&log_servers) {
            return Err(DefinitionError::LogServers);
        }
        let copies = usize::try_from(raw.replication).unwrap_or(usize::MAX);
        let replication = u8::try_from(copies)
            .ok()
            .filter(|_| (1..=log_servers.len()).contains(&copies))
            .ok_or(DefinitionError::Replication(raw.replication, log_servers.len()))?;
        let spares = nodes.iter().map(|node| node.id).collect();
        let labelled = nodes.iter().filter(|node| !node.label.is_empty());
        let domains = labelled.map(|node| (node.id, node.label.clone())).collect();
        let topology =
            Topology { candidates, proxies, resolvers, log_servers, replication, spares, domains };
        let ca = directory.join(raw.ca);
        Ok(Self { cluster: raw.cluster, register, ca, nodes, topology })
    }

    /// A node of it.
    #[must_use]
    pub fn node(&self, id: NodeId) -> Option<&DefinedNode> {
        self.nodes.iter().find(|node| node.id == id)
    }

    /// The node that is to be started.
    ///
    /// # Errors
    /// When there is none of that id.
    pub fn this_node(&self, id: u64) -> Result<&DefinedNode, DefinitionError> {
        self.node(NodeId(id)).ok_or(DefinitionError::ThisNode(id))
    }

    /// Where clients reach the nodes.
    #[must_use]
    pub fn addresses(&self) -> Vec<NodeAddress> {
        let address =
            |node: &DefinedNode| NodeAddress { node: node.id, address: node.address.clone() };
        self.nodes.iter().map(address).collect()
    }

    /// A checksum of what all nodes must agree on.
    #[must_use]
    pub fn checksum(&self) -> u32 {
        let nodes: Vec<_> =
            self.nodes.iter().map(|node| (node.id, &node.address, &node.tls_name)).collect();
        // An heir is chosen once, by the leader's labels, and the register remembers whom.
        let topology = Topology { domains: BTreeMap::new(), ..self.topology.clone() };
        let text = format!("{} {} {nodes:?} {topology:?}", self.cluster, self.register);
        crc32c::crc32c(text.as_bytes())
    }
}

fn nodes(raw: Vec<RawNode>, directory: &Path) -> Result<Vec<DefinedNode>, DefinitionError> {
    if !(1..=NODES_MAX).contains(&raw.len()) {
        return Err(DefinitionError::NodeCount(raw.len()));
    }
    let (mut ids, mut addresses) = (BTreeSet::new(), BTreeSet::new());
    raw.into_iter()
        .map(|node| {
            let id = NodeId(node.id);
            if !(1..=NODE_ID_MAX).contains(&node.id) || !ids.insert(node.id) {
                return Err(DefinitionError::NodeId(node.id));
            }
            if !is_address(&node.address) || !addresses.insert(node.address.clone()) {
                return Err(DefinitionError::Address(node.address));
            }
            let tls_name = node.tls_name.unwrap_or_else(|| quic::host(&node.address).to_owned());
            if !is_name(&tls_name) || node.label.len() > NAME_BYTES_MAX {
                let what =
                    format!("{id}: a label or a TLS name of 0 or over {NAME_BYTES_MAX} bytes");
                return Err(DefinitionError::NodeName(what));
            }
            let identity = match (node.certificate, node.key) {
                (Some(certificate), Some(key)) => Some(Identity {
                    certificate: directory.join(certificate),
                    key: directory.join(key),
                }),
                (None, None) => None,
                _ => return Err(DefinitionError::Certificate(id)),
            };
            let (address, label) = (node.address, node.label);
            Ok(DefinedNode { id, address, label, tls_name, identity })
        })
        .collect()
}

fn is_name(text: &str) -> bool {
    (1..=NAME_BYTES_MAX).contains(&text.len())
}

fn is_address(text: &str) -> bool {
    text.rsplit_once(':').is_some_and(|(host, port)| {
        !host.is_empty()
            && !host.contains(char::is_whitespace)
            && port.parse::<u16>().is_ok_and(|port| port > 0)
    })
}

fn has_twins(nodes: &[NodeId]) -> bool {
    nodes.iter().collect::<BTreeSet<_>>().len() < nodes.len()
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str = r#"
cluster = "blue"
register = "file:///tmp/register"
leaders = [1, 2]
proxies = [1, 2]
resolvers = [{ node = 1 }, { node = 2, begin = "m" }]
log_servers = [2, 1]
replication = 2
ca = "tls/ca.pem"

[[nodes]]
id = 1
address = "db1:7070"
certificate = "tls/1.pem"
key = "tls/1.key"

[[nodes]]
id = 2
address = "[::1]:7070"
label = "rack b"
tls_name = "node-2"
"#;

    fn parse(text: &str) -> Result<Definition, DefinitionError> {
        Definition::parse(text, Path::new("/etc/millrace"))
    }

    #[test]
    fn a_good_one_is_read_whole() {
        let definition = parse(GOOD).unwrap();
        assert_eq!(definition.ca, Path::new("/etc/millrace/tls/ca.pem"));
        assert_eq!(definition.topology.candidates, [NodeId(1), NodeId(2)]);
        assert_eq!(definition.topology.log_servers, [NodeId(2), NodeId(1)]);
        assert_eq!(definition.topology.resolvers[1], (NodeId(2), b"m".to_vec()));
        let one = definition.this_node(1).unwrap();
        assert_eq!((one.tls_name.as_str(), one.label.as_str()), ("db1", ""));
        let identity = one.identity.as_ref().unwrap();
        assert_eq!(identity.key, Path::new("/etc/millrace/tls/1.key"));
        assert_eq!(definition.node(NodeId(2)).unwrap().tls_name, "node-2");
        assert_eq!(definition.this_node(3), Err(DefinitionError::ThisNode(3)));
        // Labels and paths are a node's own business; roles are everybody's.
        let other = parse(&GOOD.replace("rack b", "rack c")).unwrap();
        assert_eq!(definition.checksum(), other.checksum());
        let other = parse(&GOOD.replace("[2, 1]", "[1, 2]")).unwrap();
        assert_ne!(definition.checksum(), other.checksum());
    }

    #[test]
    fn every_mistake_has_its_code() {
        let cases: &[(&str, &str, &str)] = &[
            ("cluster = \"blue\"", "cluster = blue", "cluster_syntax"),
            ("cluster = \"blue\"", "", "cluster_syntax"),
            ("label =", "lable =", "cluster_syntax"),
            ("\"blue\"", "\"\"", "cluster_name"),
            ("\"blue\"", "\"a/b\"", "cluster_name"),
            ("id = 2", "id = 1", "cluster_node_id"),
            ("id = 2", "id = 0", "cluster_node_id"),
            ("id = 2", "id = 4294967297", "cluster_node_id"),
            ("[::1]:7070", "db1:7070", "cluster_node_address"),
            ("[::1]:7070", "db2", "cluster_node_address"),
            ("[::1]:7070", "db2:0", "cluster_node_address"),
            ("tls_name = \"node-2\"", "tls_name = \"\"", "cluster_node_name"),
            ("key = \"tls/1.key\"", "", "cluster_node_certificate"),
            ("leaders = [1, 2]", "leaders = [1, 3]", "cluster_unknown_node"),
            ("proxies = [1, 2]", "proxies = [7]", "cluster_unknown_node"),
            ("{ node = 1 }", "{ node = 7 }", "cluster_unknown_node"),
            ("log_servers = [2, 1]", "log_servers = [2, 7]", "cluster_unknown_node"),
            ("leaders = [1, 2]", "leaders = []", "cluster_leaders"),
            ("leaders = [1, 2]", "leaders = [1, 1]", "cluster_leaders"),
            ("proxies = [1, 2]", "proxies = []", "cluster_proxies"),
            ("begin = \"m\"", "begin = \"\"", "cluster_resolvers"),
            ("{ node = 1 }", "{ node = 1, begin = \"a\" }", "cluster_resolvers"),
            ("log_servers = [2, 1]", "log_servers = []", "cluster_log_servers"),
            ("log_servers = [2, 1]", "log_servers = [1, 1]", "cluster_log_servers"),
            ("replication = 2", "replication = 0", "cluster_replication"),
            ("replication = 2", "replication = 3", "cluster_replication"),
            ("replication = 2", "replication = 257", "cluster_replication"),
            ("file:///tmp/register", "file", "cluster_register"),
            ("file:///tmp/register", "http://x", "cluster_register"),
        ];
        for (from, to, code) in cases {
            assert!(GOOD.contains(from), "{from}");
            let error = parse(&GOOD.replacen(from, to, 1)).expect_err(to).to_string();
            assert!(error.starts_with(&format!("{code}: ")), "{to}: {error}");
        }
        let nodes = GOOD.find("[[nodes]]").unwrap();
        let none = GOOD[..nodes].replace("ca =", "nodes = []\nca =");
        assert_eq!(parse(&none), Err(DefinitionError::NodeCount(0)));
        let missing = Definition::read(Path::new("no/such/file")).unwrap_err();
        assert!(missing.to_string().starts_with("cluster_file: no/such/file"), "{missing}");
    }
}
