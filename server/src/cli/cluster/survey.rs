//! What all nodes of a cluster say, each asked by itself.
//!
//! ```text
//!  any node --ClusterView--> addresses --one client each--> status of n1, n2, n3, or why there is none
//! ```

use std::time::Duration;

use anyhow::Result;
use serde_json::{Value, json};

use crate::cli::connect::{ConnectArgs, block_on};
use crate::cli::exit::Exit;
use crate::cli::output::Output;

/// How long one node is given to answer.
const NODE_PATIENCE: Duration = Duration::from_secs(2);

/// A node and what it says.
struct Surveyed {
    /// Its name and its address, as the others know them.
    node: String,
    address: String,
    status: Result<Value, String>,
}

async fn survey(connect: &ConnectArgs) -> Result<Vec<Surveyed>> {
    let client = connect.open().await?;
    let view = client.cluster().await?;
    if view.addresses.is_empty() {
        // A node alone.
        let status: Value = serde_json::from_str(&client.status().await?)?;
        let node = status["node"].as_str().unwrap_or_default().to_owned();
        return Ok(vec![Surveyed { node, address: String::new(), status: Ok(status) }]);
    }
    client.close().await;
    let mut asked = tokio::task::JoinSet::new();
    for (place, told) in view.addresses.into_iter().enumerate() {
        let connect = connect.clone();
        asked.spawn(async move {
            let asked = connect.status_of(&told.address, NODE_PATIENCE);
            let answer = tokio::time::timeout(NODE_PATIENCE, asked).await;
            let status = match answer {
                Ok(answer) => answer.map_err(|error| format!("{error:#}")),
                Err(_) => Err(format!("no answer within {NODE_PATIENCE:?}")),
            };
            (place, Surveyed { node: told.node.to_string(), address: told.address, status })
        });
    }
    let mut all: Vec<(usize, Surveyed)> = Vec::with_capacity(asked.len());
    while let Some(answered) = asked.join_next().await {
        all.push(answered?);
    }
    all.sort_by_key(|(place, _)| *place);
    Ok(all.into_iter().map(|(_, surveyed)| surveyed).collect())
}

impl Surveyed {
    fn state(&self) -> &'static str {
        match &self.status {
            Ok(status) if status["serving"] == true => "serving",
            Ok(_) => "not_serving",
            Err(_) => "unreachable",
        }
    }

    fn json(&self) -> Value {
        let mut line = json!({"node": self.node, "address": self.address, "state": self.state()});
        match &self.status {
            Ok(status) => {
                for key in ["incarnation", "up_ms", "epoch", "roles", "recovery", "connections"] {
                    line[key] = status[key].clone();
                }
                line["label"] = status["cluster"]["label"].clone();
                let links = status["cluster"]["nodes"].as_array().into_iter().flatten();
                let link = |link: &Value| {
                    (link["node"].as_str().unwrap_or_default().to_owned(), link["state"].clone())
                };
                line["links"] = Value::Object(links.map(link).collect());
            }
            Err(why) => line["error"] = json!(why),
        }
        line
    }

    fn text(&self) -> String {
        let Self { node, address, .. } = self;
        let head = format!("{node:<6} {address:<22} {:<12}", self.state());
        match &self.status {
            Err(why) => format!("{head} {why}"),
            Ok(status) => {
                let roles = status["roles"].as_array().into_iter().flatten();
                let roles: Vec<&str> = roles.filter_map(Value::as_str).collect();
                let label = status["cluster"]["label"].as_str().filter(|label| !label.is_empty());
                let label = label.map(|label| format!("  [{label}]")).unwrap_or_default();
                format!("{head} epoch {:<5} {}{label}", status["epoch"], roles.join(", "))
            }
        }
    }
}

/// `node list`.
pub(super) fn list(connect: &ConnectArgs, output: Output) -> Result<Exit> {
    block_on(async {
        for surveyed in survey(connect).await? {
            output.print(&surveyed.json(), || surveyed.text())?;
        }
        Ok(Exit::Done)
    })
}

/// `cluster describe`.
pub(super) fn describe(connect: &ConnectArgs, output: Output) -> Result<Exit> {
    block_on(async {
        let nodes = survey(connect).await?;
        let json = description(&nodes);
        output.print(&json, || description_text(&json, &nodes))?;
        Ok(Exit::Done)
    })
}

/// What all nodes say, as one.
pub(super) async fn description_of(connect: &ConnectArgs) -> Result<Value> {
    Ok(description(&survey(connect).await?))
}

/// The newest epoch is the cluster's, and its leader knows best how it stands.
fn description(nodes: &[Surveyed]) -> Value {
    let answers = || nodes.iter().filter_map(|node| node.status.as_ref().ok());
    let newest = answers().max_by_key(|status| status["epoch"].as_u64());
    let newest = newest.cloned().unwrap_or_default();
    let leading = answers().find(|status| {
        let phase = status["recovery"]["phase"].as_str();
        phase.is_some_and(|phase| phase != "following" && phase != "idle")
    });
    let leader = leading.map_or(&newest["plan"]["leader"], |status| &status["node"]);
    let recovery = leading.map(|status| status["recovery"].clone()).unwrap_or_default();
    json!({
        "cluster": newest["cluster"]["name"],
        "epoch": newest["epoch"],
        "serving": newest["serving"],
        "leader": leader,
        "phase": recovery["phase"],
        "phase_ms": recovery["since_ms"],
        "waiting_for": recovery["waiting_for"],
        "cause": recovery["cause"],
        "generations": recovery["generations"],
        "members": recovery["members"],
        "register": newest["register"],
        "plan": newest["plan"],
        "nodes": nodes.iter().map(Surveyed::json).collect::<Vec<_>>(),
    })
}

fn description_text(json: &Value, nodes: &[Surveyed]) -> String {
    let names = |role: &str| {
        let all = json["plan"][role].as_array().into_iter().flatten();
        all.filter_map(Value::as_str).collect::<Vec<_>>().join(", ")
    };
    let word = |value: &Value| value.as_str().unwrap_or("?").to_owned();
    let mut lines = vec![
        format!("cluster      {}", json["cluster"].as_str().unwrap_or("none: a node alone")),
        format!("epoch        {}, serving: {}", json["epoch"], json["serving"]),
        format!(
            "leader       {}: {} for {} ms, since {}{}",
            word(&json["leader"]),
            word(&json["phase"]),
            json["phase_ms"],
            word(&json["cause"]),
            match json["waiting_for"].as_str() {
                None | Some("") => String::new(),
                Some(what) => format!(", waiting for {what}"),
            }
        ),
        format!(
            "register     {}, {}",
            word(&json["register"]["at"]),
            word(&json["register"]["state"])
        ),
        format!("proxies      {}", names("proxies")),
        format!("resolvers    {}", names("resolvers")),
        format!("log servers  {}; {} copies", names("log_servers"), json["plan"]["replication"]),
    ];
    if !names("absent").is_empty() {
        lines.push(format!("absent       {}", names("absent")));
    }
    for (key, what) in [("drained", "drained     "), ("removed", "removed     ")] {
        let nodes = json["members"][key].as_array().into_iter().flatten();
        let nodes: Vec<&str> = nodes.filter_map(Value::as_str).collect();
        if !nodes.is_empty() {
            lines.push(format!("{what} {}", nodes.join(", ")));
        }
    }
    let waiting = json["members"]["seats_waiting"].as_array().into_iter().flatten();
    lines.extend(waiting.filter_map(Value::as_str).map(|what| format!("seats        {what}")));
    lines.extend(nodes.iter().map(Surveyed::text));
    lines.join("\n")
}
