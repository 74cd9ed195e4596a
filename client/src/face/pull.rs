//! A consumer's place in the log.

use common::Version;
use tokio::sync::oneshot;

use super::{Client, Command, Ended, closed, expect_answer};
use crate::Error;
use crate::session::{Answer, Pulled, PullerId};

/// Whole versions of some streams, one answer after the other.
#[derive(Debug)]
pub struct Pull {
    client: Client,
    puller: PullerId,
    /// The answer that is waited for: it survives a dropped [`Pull::next`].
    pending: Option<oneshot::Receiver<Result<Answer, Error>>>,
}

impl Pull {
    pub(super) const fn new(client: Client, puller: PullerId) -> Self {
        Self { client, puller, pending: None }
    }

    /// The next versions, or a progress mark when there are none. Waits for news; may be dropped and called
    /// again without losing any.
    ///
    /// # Errors
    /// [`Error::Corrupt`] for a gap or damage, [`Error::FixRequest`] when the records are trimmed or the
    /// stream does not exist. The pull then stays where it is.
    pub async fn next(&mut self) -> Result<Pulled, Error> {
        self.next_until(Version::ZERO).await
    }

    /// Like [`Pull::next`], but waits no longer than until the log is known through `want`: whoever reads at
    /// a version needs to know that nothing else is below it.
    ///
    /// # Errors
    /// As [`Pull::next`].
    pub async fn next_until(&mut self, want: Version) -> Result<Pulled, Error> {
        if self.pending.is_none() {
            let (reply, answer) = oneshot::channel();
            let command = Command::Pull(self.puller, want, reply);
            self.client.commands.send(command).await.map_err(|_| closed())?;
            self.pending = Some(answer);
        }
        let pending = self.pending.as_mut().expect("set above");
        let answered = pending.await;
        self.pending = None;
        expect_answer!(answered.map_err(|_| closed())??, Answer::Pulled)
    }

    pub(super) const fn client(&self) -> &Client {
        &self.client
    }
}

impl Drop for Pull {
    fn drop(&mut self) {
        // A driver that is gone has no pullers.
        let _ = self.client.ended.send(Ended::Puller(self.puller));
    }
}
