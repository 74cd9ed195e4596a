//! The catalog as a client sees it: a follower of the catalog's stream, and the calls that need it.
//!
//! ```text
//!  call --> read version R --> pull the catalog until through >= R --> list, resolve
//!                                                                 `--> define: commit one record at R
//!                         conflict, exists: somebody defined the name or the id; again with a new R
//! ```

use common::catalog::{Catalog, StreamDefinition};
use common::{Code, Cx, StreamId, Version};

use super::errand::{Errand, Work};
use super::pull::{PullFrom, PullerId, Waiter};
use super::question::Ask;
use super::{Answer, CallId, Item, Key, Owner, Pulled, Session};
use crate::{Error, Transaction};

/// Conflicts with other definitions, at most; each means that somebody else's succeeded.
const DEFINE_ATTEMPTS_MAX: u32 = 32;

/// What a call wants of the catalog.
#[derive(Clone, Debug)]
pub(super) enum Want {
    List,
    Resolve(String),
    Create(String),
}

/// How far a call is.
#[derive(Clone, Debug)]
pub(super) struct CatalogWork {
    want: Want,
    /// The catalog must be known through it.
    pub(super) read_version: Option<Version>,
    /// The id that is being defined.
    defining: StreamId,
    pub(super) is_committing: bool,
    attempts: u32,
}

impl Errand {
    fn catalog(call: CallId, want: Want) -> Self {
        let work = CatalogWork {
            want,
            read_version: None,
            defining: StreamId::ZERO,
            is_committing: false,
            attempts: 0,
        };
        Self::new(call, Work::Catalog(work))
    }

    pub(super) fn create(call: CallId, name: &str) -> Self {
        Self::catalog(call, Want::Create(name.to_owned()))
    }

    pub(super) fn list(call: CallId) -> Self {
        Self::catalog(call, Want::List)
    }

    pub(super) fn resolve(call: CallId, name: &str) -> Self {
        Self::catalog(call, Want::Resolve(name.to_owned()))
    }
}

/// All definitions through some version.
#[derive(Clone, Debug, Default)]
pub(super) struct Follower {
    catalog: Catalog,
    through: Version,
    puller: Option<PullerId>,
}

impl Session {
    pub(super) fn place_catalog(&mut self, cx: &mut Cx<'_>, key: Key) -> bool {
        let Some(Errand { work: Work::Catalog(work), deadline, is_asking, .. }) =
            self.errands.get_mut(&key)
        else {
            panic!("{key:?} is not about the catalog");
        };
        let Some(read_version) = work.read_version else {
            *is_asking = true;
            let deadline = Some(*deadline);
            self.ask(cx, Owner::Errand(key), Ask::ReadVersion, deadline);
            return true;
        };
        if self.catalog.through < read_version {
            self.follow_catalog(cx, read_version);
            return true;
        }
        let want = work.want.clone();
        match want {
            Want::List => {
                let all = self.catalog.catalog.iter();
                let streams = all.map(|(name, stream)| (name.to_owned(), stream)).collect();
                self.finish_errand(key, Ok(Answer::Streams(streams)));
            }
            Want::Resolve(name) => {
                let found = self.catalog.catalog.find(&name);
                self.finish_errand(key, Ok(Answer::Resolved(found)));
            }
            Want::Create(name) => self.define(cx, key, name, read_version),
        }
        true
    }

    fn define(&mut self, cx: &mut Cx<'_>, key: Key, name: String, read_version: Version) {
        if let Some(stream) = self.catalog.catalog.find(&name) {
            let error = Error::new(Code::StreamExists, format!("{name} is {stream}"));
            return self.finish_errand(key, Err(error));
        }
        let definition = StreamDefinition { name, stream: self.catalog.catalog.next_id() };
        let mut transaction = Transaction::new();
        transaction.read_version(read_version);
        transaction.record(StreamId::CATALOG, &definition.to_record());
        let sealed = match transaction.seal(cx.knobs) {
            Ok(sealed) => sealed,
            Err(error) => return self.finish_errand(key, Err(error)),
        };
        let errand = self.errands.get_mut(&key).expect("the caller has looked it up");
        let Work::Catalog(work) = &mut errand.work else { panic!("{key:?} defines a stream") };
        (work.defining, work.is_committing) = (definition.stream, true);
        errand.is_asking = true;
        let deadline = errand.deadline;
        self.bytes += sealed.bytes;
        self.start_commit(cx, Owner::Errand(key), None, sealed, deadline);
    }

    /// The definition has its verdict.
    pub(super) fn handle_errand_committed(
        &mut self,
        cx: &mut Cx<'_>,
        key: Key,
        result: Result<Answer, Error>,
    ) {
        let Some(errand) = self.errands.get_mut(&key) else { return };
        errand.is_asking = false;
        let Work::Catalog(work) = &mut errand.work else { panic!("{key:?} has committed") };
        work.is_committing = false;
        work.attempts += 1;
        match result {
            Ok(_) => {
                let stream = work.defining;
                self.finish_errand(key, Ok(Answer::Created(stream)));
            }
            Err(error)
                if matches!(error.code(), Code::Conflict | Code::TooOld | Code::StreamExists)
                    && work.attempts < DEFINE_ATTEMPTS_MAX =>
            {
                work.read_version = None;
                self.retry_errand(cx, key);
            }
            Err(error) => self.finish_errand(key, Err(error)),
        }
    }

    fn follow_catalog(&mut self, cx: &mut Cx<'_>, read_version: Version) {
        let puller = match self.catalog.puller {
            Some(puller) => puller,
            None => {
                let from = PullFrom::after(vec![StreamId::CATALOG], self.catalog.through);
                let puller = self.insert_puller(cx, from);
                self.catalog.puller = Some(puller);
                puller
            }
        };
        self.want_pull(puller, Waiter::Catalog, read_version);
    }

    /// More of the catalog, or why there is none.
    pub(super) fn handle_catalog(&mut self, cx: &mut Cx<'_>, result: Result<Pulled, Error>) {
        let taken = result.and_then(|pulled| self.take_catalog(&pulled));
        let waiting: Vec<Key> = self
            .errands
            .iter()
            .filter(|(_, errand)| matches!(errand.work, Work::Catalog(_)))
            .map(|(key, _)| *key)
            .collect();
        match taken {
            Ok(()) => {
                for key in waiting {
                    self.ready.insert(Item::Errand(key));
                }
            }
            Err(error) => {
                if let Some(puller) = self.catalog.puller.take() {
                    self.close_puller(cx, puller);
                }
                for key in waiting {
                    let errand = &self.errands[&key];
                    if !errand.is_asking {
                        self.finish_errand(key, Err(error.clone()));
                    }
                }
            }
        }
    }

    fn take_catalog(&mut self, pulled: &Pulled) -> Result<(), Error> {
        for batch in &pulled.batches {
            for delivered in batch.records()? {
                let definition = StreamDefinition::from_record(&delivered.record)?;
                self.catalog.catalog.define(definition);
            }
        }
        assert!(pulled.through >= self.catalog.through, "the catalog goes backwards");
        self.catalog.through = pulled.through;
        Ok(())
    }
}
