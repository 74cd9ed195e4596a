//! A view that follows the log by itself.

use common::Version;

use super::{Client, Pull};
use crate::{Error, ReadTransaction, View};

/// A [`View`] and the pull that feeds it.
#[derive(Debug)]
pub struct LiveView {
    view: View,
    pull: Pull,
}

impl LiveView {
    pub(super) fn new(pull: Pull) -> Self {
        Self { view: View::new(), pull }
    }

    /// What is known so far.
    #[must_use]
    pub const fn view(&self) -> &View {
        &self.view
    }

    /// Nobody reads below `below` any more.
    pub fn prune(&mut self, below: Version) {
        self.view.prune(below);
    }

    /// Follows the log until the view knows everything through `version`.
    ///
    /// # Errors
    /// As [`Pull::next`].
    pub async fn reach(&mut self, version: Version) -> Result<(), Error> {
        while self.view.through() < version {
            let pulled = self.pull.next_until(version).await?;
            self.view.follow(&pulled.batches, pulled.through)?;
        }
        Ok(())
    }

    /// Begins an interactive transaction that sees every commit acknowledged so far.
    ///
    /// # Errors
    /// When there is no read version, or the log can't be followed to it.
    pub async fn begin(&mut self) -> Result<ReadTransaction, Error> {
        let client: Client = self.pull.client().clone();
        let version = client.read_version().await?;
        self.reach(version).await?;
        Ok(ReadTransaction::new(version))
    }
}
