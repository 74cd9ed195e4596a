//! A TCP proxy that harms one connection at the worst moment.
//!
//! ```text
//! register --> Cutter --> server      waits for the needle, a value that is to be written, among the bytes
//!          <--        <--             that go to the server; then does its harm
//! ```

use std::sync::{Arc, Mutex};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Notify;
use tokio::task::JoinHandle;

/// What happens to the connection that carries the needle.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Harm {
    /// Nothing.
    None,
    /// It is cut before the needle has reached the server.
    CutBefore,
    /// The needle reaches the server, no answer comes back, and [`Cutter::cut`] ends the client's side.
    CutAfter,
    /// The needle reaches the server; no answer ever comes back.
    Silence,
    /// The needle waits here until [`Cutter::cut`], then goes on.
    Hold,
    /// Nothing reaches the server, on any connection, and no answer comes.
    Swallow,
}

/// The proxy. Connections to the server stay open while it lives, so that what has reached it is carried out.
pub struct Cutter {
    port: u16,
    shared: Arc<Shared>,
    listener: JoinHandle<()>,
}

struct Shared {
    plan: Mutex<Plan>,
    cut: Notify,
}

struct Plan {
    harm: Harm,
    needle: Vec<u8>,
    is_done: bool,
    is_cut: bool,
}

impl Cutter {
    /// Listens on a free port of loopback.
    ///
    /// # Panics
    /// When there is none.
    pub async fn start(server_port: u16) -> Self {
        Self::start_at("127.0.0.1", server_port).await
    }

    /// Listens on a free port of this address; the server is on loopback.
    ///
    /// # Panics
    /// When there is none.
    pub async fn start_at(host: &str, server_port: u16) -> Self {
        let listener = TcpListener::bind((host, 0)).await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let plan = Mutex::new(Plan::new(Harm::None, b""));
        let shared = Arc::new(Shared { plan, cut: Notify::new() });
        let mine = Arc::clone(&shared);
        let listener = tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                if let Ok(server) = TcpStream::connect(("127.0.0.1", server_port)).await {
                    tokio::spawn(pipe(client, server, Arc::clone(&mine)));
                }
            }
        });
        Self { port, shared, listener }
    }

    /// Where it listens.
    #[must_use]
    pub const fn port(&self) -> u16 {
        self.port
    }

    /// What is to happen next, once.
    ///
    /// # Panics
    /// When a task of the proxy has panicked.
    pub fn arm(&self, harm: Harm, needle: &[u8]) {
        *self.shared.plan.lock().unwrap() = Plan::new(harm, needle);
    }

    /// Whether the needle has come by.
    ///
    /// # Panics
    /// When a task of the proxy has panicked.
    #[must_use]
    pub fn is_done(&self) -> bool {
        self.shared.plan.lock().unwrap().is_done
    }

    /// Ends the client's side of the connection that [`Harm::CutAfter`] has hit; lets go what [`Harm::Hold`]
    /// holds.
    ///
    /// # Panics
    /// When a task of the proxy has panicked.
    pub fn cut(&self) {
        self.shared.plan.lock().unwrap().is_cut = true;
        self.shared.cut.notify_one();
    }
}

impl Shared {
    async fn until_cut(&self) {
        while !self.plan.lock().unwrap().is_cut {
            self.cut.notified().await;
        }
    }
}

impl Plan {
    fn new(harm: Harm, needle: &[u8]) -> Self {
        Self { harm, needle: needle.to_vec(), is_done: false, is_cut: false }
    }
}

impl Drop for Cutter {
    fn drop(&mut self) {
        self.listener.abort();
    }
}

async fn pipe(mut client: TcpStream, mut server: TcpStream, shared: Arc<Shared>) {
    let (mut up, mut down) = (vec![0; 64 << 10], vec![0; 64 << 10]);
    // The end of what has gone up: the needle may come in pieces.
    let mut tail = Vec::new();
    let mut harm = Harm::None;
    loop {
        tokio::select! {
            biased;
            read = client.read(&mut up) => {
                let Some(length) = read.ok().filter(|length| *length > 0) else { break };
                tail.extend_from_slice(&up[..length]);
                {
                    let mut plan = shared.plan.lock().unwrap();
                    if plan.harm == Harm::Swallow {
                        harm = Harm::Swallow;
                    } else if harm == Harm::None && !plan.is_done && finds(&tail, &plan.needle) {
                        (plan.is_done, harm) = (true, plan.harm);
                    }
                    tail.drain(..tail.len().saturating_sub(plan.needle.len()));
                }
                match harm {
                    Harm::CutBefore => return,
                    Harm::Swallow => {}
                    Harm::Hold => {
                        shared.until_cut().await;
                        if server.write_all(&up[..length]).await.is_err() {
                            return;
                        }
                    }
                    _ if server.write_all(&up[..length]).await.is_err() => return,
                    _ => {}
                }
            }
            read = server.read(&mut down) => {
                let Some(length) = read.ok().filter(|length| *length > 0) else { return };
                match harm {
                    Harm::CutAfter | Harm::Silence | Harm::Swallow => {}
                    _ if client.write_all(&down[..length]).await.is_err() => break,
                    _ => {}
                }
            }
            () = shared.until_cut(), if harm == Harm::CutAfter => break,
        }
    }
    // The client has gone; the server must not notice before it has done what it was told.
    drop(client);
    if harm != Harm::None {
        while server.read(&mut down).await.is_ok_and(|length| length > 0) {}
    }
}

fn finds(bytes: &[u8], needle: &[u8]) -> bool {
    !needle.is_empty() && bytes.windows(needle.len()).any(|window| window == needle)
}
