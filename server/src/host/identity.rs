//! Who a node is: an id for good and a number for each life, in one small file.
//!
//! ```text
//! millrace 1          format
//! node 9f3c...        16 hex digits, drawn once
//! incarnation 12      grows by one at each start
//! ```

use std::fs::{self, File};
use std::io::Write;
use std::path::Path;

use anyhow::{Context, Result, bail};
use common::{Code, Incarnation, NodeId, Peer, Refusal};

const FILE: &str = "identity";
const FORMAT: &str = "millrace 1";

/// Who a directory's node may be.
#[derive(Clone, Copy, Debug)]
pub(super) enum Claim {
    /// Whoever it was; this one, when it is new.
    Fresh(u64),
    /// The node of a cluster, and no other.
    Defined(NodeId),
}

/// Reads who this is, and begins a new life: the file is durable before this returns.
///
/// # Errors
/// When the file can't be read or written, or is not an identity; a refusal when it is another node's.
pub(super) fn begin_life(directory: &Path, claim: Claim) -> Result<Peer> {
    let path = directory.join(FILE);
    let peer = match fs::read_to_string(&path) {
        Ok(text) => {
            let old = parse(&text).with_context(|| format!("{} is damaged", path.display()))?;
            Peer { node: old.node, incarnation: old.incarnation.plus(1) }
        }
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            let node = match claim {
                Claim::Fresh(id) => NodeId(id),
                Claim::Defined(node) => node,
            };
            Peer { node, incarnation: Incarnation(1) }
        }
        Err(error) => return Err(error).with_context(|| path.display().to_string()),
    };
    if let Claim::Defined(node) = claim
        && node != peer.node
    {
        let what = format!("{} is the directory of {}, not of {node}", path.display(), peer.node);
        return Err(Refusal::new(Code::IdentityClash, what).into());
    }
    let text = format!("{FORMAT}\nnode {:016x}\nincarnation {}\n", peer.node.0, peer.incarnation.0);
    let temporary = directory.join("identity.new");
    let mut file = File::create(&temporary)?;
    file.write_all(text.as_bytes())?;
    file.sync_all()?;
    fs::rename(&temporary, &path)?;
    File::open(directory)?.sync_all()?;
    Ok(peer)
}

fn parse(text: &str) -> Result<Peer> {
    let mut lines = text.lines();
    if lines.next() != Some(FORMAT) {
        bail!("the first line is not {FORMAT:?}");
    }
    let mut field = |name: &str| {
        let value = lines.next().and_then(|line| line.strip_prefix(name)).map(str::trim);
        value.with_context(|| format!("no {name}"))
    };
    let node = NodeId(u64::from_str_radix(field("node ")?, 16)?);
    let incarnation = Incarnation(field("incarnation ")?.parse()?);
    Ok(Peer { node, incarnation })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_id_stays_and_lives_are_counted() {
        let directory = tempfile::tempdir().unwrap();
        let first = begin_life(directory.path(), Claim::Fresh(77)).unwrap();
        assert_eq!((first.node, first.incarnation), (NodeId(77), Incarnation(1)));
        let second = begin_life(directory.path(), Claim::Fresh(99)).unwrap();
        assert_eq!((second.node, second.incarnation), (NodeId(77), Incarnation(2)));
        let error = begin_life(directory.path(), Claim::Defined(NodeId(7))).unwrap_err();
        let code = error.downcast_ref().map(Refusal::code);
        assert_eq!(code, Some(Code::IdentityClash), "{error}");
        let third = begin_life(directory.path(), Claim::Defined(NodeId(77))).unwrap();
        assert_eq!(third.incarnation, Incarnation(3), "a refusal is no life");
        fs::write(directory.path().join(FILE), "hello").unwrap();
        assert!(begin_life(directory.path(), Claim::Fresh(1)).is_err());
    }
}
