//! Marks: rare branches that the simulator must reach.

macro_rules! marks {
    ($($(#[$doc:meta])* $name:ident $text:literal $rarity:ident,)*) => {
        /// A rare branch. A batch of simulator seeds fails when one that is not declared rare stays unhit.
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
        pub enum Mark {
            $($(#[$doc])* $name),*
        }

        impl Mark {
            /// All marks.
            pub const ALL: &[Self] = &[$(Self::$name),*];

            /// The name in lists.
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self { $(Self::$name => $text),* }
            }

            /// How often it must be hit.
            #[must_use]
            pub const fn rarity(self) -> Rarity {
                match self { $(Self::$name => Rarity::$rarity),* }
            }
        }
    };
}

/// How often a mark must be hit.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Rarity {
    /// In every batch of 2,000 seeds.
    Common,
    /// In every batch of 20,000 seeds.
    Uncommon,
    /// Need not be hit; listed as debt.
    Rare,
}

marks! {
    /// A version request that was answered before came again.
    VersionRequestAgain "sequencer.version_request_again" Common,
    /// A version request came before an earlier one of its proxy.
    VersionRequestEarly "sequencer.version_request_early" Common,
    /// A batch reached a resolver before its predecessor.
    ResolveEarly "resolver.early" Common,
    /// A batch that was decided before came again.
    ResolveAgain "resolver.again" Common,
    /// A read version had left the window.
    ResolveTooOld "resolver.too_old" Common,
    /// A conflict with an earlier transaction of the same batch.
    ConflictInBatch "resolver.conflict_in_batch" Common,
    /// A batch waited at a resolver for another proxy's settlement.
    ResolveHeld "resolver.held" Common,
    /// A batch waited because too much was not settled.
    UnsettledFull "resolver.unsettled_full" Uncommon,
    /// A resolver left a conflict with a proxy's own writes to it.
    LeftToProxy "resolver.left_to_proxy" Common,
    /// A settlement came again.
    SettlementAgain "resolver.settlement_again" Common,
    /// A batch was settled before an earlier one of the chain.
    SettledEarly "resolver.settled_early" Common,
    /// A proxy found a conflict with its own writes.
    OwnConflict "proxy.own_conflict" Common,
    /// A proxy found that none of its own writes that a resolver had met stands.
    OwnConflictVoid "proxy.own_conflict_void" Common,
    /// A settlement went unconfirmed and was sent again.
    SettleAgain "proxy.settle_again" Common,
    /// A settlement was sent without a batch, since none was near.
    SettleAlone "proxy.settle_alone" Common,
    /// No batch was opened because too many settlements were not confirmed.
    SettlementsFull "proxy.settlements_full" Uncommon,
    /// A commit request that is settled or pending came again.
    CommitAgain "proxy.commit_again" Common,
    /// A batch closed because it was full.
    BatchFull "proxy.batch_full" Common,
    /// A batch waited because the pipeline was full.
    PipelineFull "proxy.pipeline_full" Common,
    /// A request of a role was sent again for want of an answer.
    Retransmit "proxy.retransmit" Common,
    /// An idle proxy committed an empty batch.
    Heartbeat "proxy.heartbeat" Common,
    /// A transaction waited until the catalog was known far enough.
    CatalogWait "proxy.catalog_wait" Common,
    /// An ordered lane broke.
    LaneBroken "proxy.lane_broken" Common,
    /// A new lane took the place of a quiet one.
    LaneDropped "proxy.lane_dropped" Rare,
    /// A read version from the future was refused.
    FutureVersion "proxy.future_version" Common,
    /// A push reached a log server before its predecessor.
    PushEarly "logserver.push_early" Common,
    /// A push that was taken before came again.
    PushAgain "logserver.push_again" Common,
    /// A push of a locked epoch was refused.
    PushLocked "logserver.push_locked" Common,
    /// Several frames shared one flush.
    GroupFlush "logserver.group_flush" Common,
    /// The log went on in the next segment.
    SegmentRolled "logserver.segment_rolled" Common,
    /// The next segment was not ready when it was needed.
    SegmentLate "logserver.segment_late" Uncommon,
    /// A torn tail was cut when the log was opened.
    TornTail "logserver.torn_tail" Common,
    /// A segment's footer was used instead of a scan.
    FooterUsed "logserver.footer_used" Common,
    /// A segment without a whole footer was scanned.
    FooterMissing "logserver.footer_missing" Common,
    /// What nothing vouched for was written again when the log was opened.
    WrittenAgain "logserver.written_again" Common,
    /// A pull was served from memory.
    PullFromTail "logserver.pull_from_tail" Common,
    /// A pull was served by reads.
    PullFromDisk "logserver.pull_from_disk" Common,
    /// A pull was served by what had been read ahead of it.
    PullReadAhead "logserver.pull_read_ahead" Common,
    /// A pull waited for news.
    PullWaited "logserver.pull_waited" Common,
    /// A segment was recycled.
    SegmentRecycled "logserver.segment_recycled" Common,
    /// The disk was full.
    DiskFull "logserver.disk_full" Uncommon,
    /// The disk had space again.
    DiskFreed "logserver.disk_freed" Uncommon,
    /// Frames of an older epoch above the recovery version were dropped.
    TailDropped "logserver.tail_dropped" Common,
    /// A register write had an unknown outcome.
    RegisterIndeterminate "leader.register_indeterminate" Common,
    /// A register write was lost to somebody else.
    RegisterLost "leader.register_lost" Common,
    /// A recovery began in the recovery of an older epoch.
    RecoveryInterrupted "leader.recovery_interrupted" Common,
    /// A peer whose connection broke was still living the same life.
    PeerLivesOn "leader.peer_lives_on" Common,
    /// A leader heard of a newer one.
    LeaderGaveWay "leader.gave_way" Uncommon,
    /// A recovery went on without a node that it would have liked to use.
    RecoveredWithoutNode "leader.recovered_without_node" Uncommon,
    /// A recovery went on without a log server.
    RecoveredWithoutLog "leader.recovered_without_log" Common,
    /// An absent log server began to catch up.
    CatchUpBegan "logserver.catch_up_began" Common,
    /// What an absent log server had of an old epoch was cut off before it caught up.
    CatchUpCut "logserver.catch_up_cut" Uncommon,
    /// An absent log server that was restarted went on where it was.
    CatchUpResumed "logserver.catch_up_resumed" Uncommon,
    /// A log server that caught up took a trim over.
    CatchUpTrim "logserver.catch_up_trim" Uncommon,
    /// A copy came from the next holder, since the first one can't read it.
    CatchUpElsewhere "logserver.catch_up_elsewhere" Rare,
    /// A damaged block was mended.
    Mended "logserver.mended" Uncommon,
    /// A damaged block was mended with what was still in memory.
    MendedFromTail "logserver.mended_from_tail" Rare,
    /// A block that could not be read could be after all.
    MendNotNeeded "logserver.mend_not_needed" Rare,
    /// A damaged block came from another holder than the first one that was asked.
    MendElsewhere "logserver.mend_elsewhere" Rare,
    /// A segment was closed early, so that its footer stands in for frame headers that are lost.
    MendRolled "logserver.mend_rolled" Rare,
    /// A pull waited until a block was mended.
    MendAwaited "logserver.mend_awaited" Uncommon,
    /// Reading the log through found damage that nobody had met.
    ScrubFound "logserver.scrub_found" Uncommon,
    /// The log was read through.
    ScrubEnded "logserver.scrub_ended" Common,
    /// Copying was held back, so that others can serve.
    CatchUpThrottled "logserver.catch_up_throttled" Uncommon,
    /// The heir of a lost or leaving log server sits in its seat.
    SeatInherited "leader.seat_inherited" Uncommon,
    /// The seat of a log server that was silent for long was given to a spare node.
    SeatOverdue "leader.seat_overdue" Uncommon,
    /// An heir was lost before it sat, and another was named.
    HeirReplaced "leader.heir_replaced" Rare,
    /// An absent log server is whole again.
    LogServerReturned "leader.log_server_returned" Common,
    /// One that should have returned could not.
    ReturnFailed "leader.return_failed" Uncommon,
    /// A phase took so long that the recovery started over.
    RecoveryLate "leader.recovery_late" Uncommon,
    /// A leader that stopped made another one lead.
    LeaderHandedOver "leader.handed_over" Rare,
    /// A commit whose outcome was unknown turned out to have committed.
    UnknownCommitted "client.unknown_committed" Common,
    /// A commit whose outcome was unknown turned out not to have committed.
    UnknownAbsent "client.unknown_absent" Common,
}
