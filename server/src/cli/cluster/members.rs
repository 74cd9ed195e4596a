//! `millrace node drain|restore|remove`: decisions about a node, and waiting for what comes of them.
//!
//! ```text
//!  client --ChangeMember--> leader: in the register --MemberChanged--> decided
//!         --status of all--> the leader's plan without the node ------> passed on
//! ```

use std::time::{Duration, Instant};

use anyhow::Result;
use common::NodeId;
use common::membership::MemberChange;
use serde_json::{Value, json};

use super::MemberArgs;
use super::survey::description_of;
use crate::cli::connect::block_on;
use crate::cli::exit::{Exit, Failure};
use crate::cli::output::Output;

/// Between two looks at the cluster.
const LOOK_EVERY: Duration = Duration::from_millis(200);

/// `node drain`, `node restore`, `node remove`.
pub(super) fn change(args: &MemberArgs, change: MemberChange, output: Output) -> Result<Exit> {
    block_on(async {
        let node = NodeId(args.node);
        let client = args.connect.open().await?;
        client.change_member(node, change).await?;
        client.close().await;
        let mut seats = Vec::new();
        if args.wait > 0 && change != MemberChange::Restore {
            seats = wait_for_seat(args, node).await?;
        }
        let line = json!({
            "node": node.to_string(),
            "change": change.word(),
            "decided": true,
            "seat_passed_on": args.wait > 0 && change != MemberChange::Restore,
            "log_servers": seats,
        });
        output.print(&line, || format!("{node}: {} is decided", change.word()))?;
        Ok(Exit::Done)
    })
}

/// Until the node is no log server of the live epoch, present or absent: who is then.
async fn wait_for_seat(args: &MemberArgs, node: NodeId) -> Result<Vec<Value>> {
    let deadline = Instant::now() + Duration::from_secs(args.wait);
    let name = json!(node.to_string());
    loop {
        let seen = description_of(&args.connect).await;
        let plan = seen.as_ref().map(|seen| seen["plan"].clone()).unwrap_or_default();
        let list = |role: &str| plan[role].as_array().cloned().unwrap_or_default();
        let (present, absent) = (list("log_servers"), list("absent"));
        let is_seated = present.contains(&name) || absent.contains(&name);
        if !present.is_empty() && !is_seated {
            return Ok(present);
        }
        if Instant::now() >= deadline {
            let waits = match seen {
                Ok(seen) => seen["members"]["seats_waiting"].to_string(),
                Err(error) => format!("{error:#}"),
            };
            let what = format!("{node} still has its seat after {} s: {waits}", args.wait);
            return Err(Failure::unavailable(what).into());
        }
        tokio::time::sleep(LOOK_EVERY).await;
    }
}
