//! Planted bugs: the test of the tests. Each is a mistake that a role can make on demand, so that the
//! simulator can show that the oracle that is meant for it bites.
//!
//! A production build can't have them: [`Cx::planted`](crate::Cx::planted) is `false` at compile time without
//! the feature `plants`, and nothing but the simulator ever sets the switch.

macro_rules! plants {
    ($($name:ident $id:literal $text:literal [$($rule:literal)+],)*) => {
        /// A planted bug.
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
        pub enum Plant {
            $(#[doc = $text] $name),*
        }

        impl Plant {
            /// All of them.
            pub const ALL: &[Self] = &[$(Self::$name),*];

            /// The name in lists.
            #[must_use]
            pub const fn id(self) -> &'static str {
                match self { $(Self::$name => $id),* }
            }

            /// What goes wrong.
            #[must_use]
            pub const fn text(self) -> &'static str {
                match self { $(Self::$name => $text),* }
            }

            /// The oracle rules that are meant for it, by the start of their names; the first is the main
            /// one.
            #[must_use]
            pub const fn expected(self) -> &'static [&'static str] {
                match self { $(Self::$name => &[$($rule),+]),* }
            }
        }
    };
}

plants! {
    AckBeforeSync "P01" "A log server writes frames without a barrier." ["I7"],
    OneLogMissing "P02" "A proxy replies while one log server is not durable." ["I3"],
    ReplyBeforeLogs "P03" "A log server tells proxies of what it has only accepted." ["I3"],
    SkipReads "P04" "A resolver skips the reads of one transaction in twenty." ["O1"],
    IgnoreTooOld "P05" "A resolver takes a read version that is too old for the oldest one." ["O1"],
    ForgetWrites "P06" "A resolver forgets the writes of one transaction in twenty." ["O1"],
    ResolveOutOfOrder "P08" "A resolver decides what comes, without waiting for its predecessor." ["I1"],
    FirstVerdict "P10" "A proxy takes the first resolver's verdict for all." ["O1"],
    LongestLog "P12" "A leader takes the longest log's end for the recovery version." ["O16" "I9"],
    LeastKnown "P13" "A leader takes the lowest known committed version for the recovery version." ["I9"],
    LockedPush "P15" "A log server goes on with an epoch after it has answered its lock." ["I8"],
    ServeUnwritten "P18" "A leader announces a generation that is not in the register." ["I10"],
    FirstVersionLow "P19" "A sequencer begins right above the recovery version." ["I5"],
    ReadUnproven "P20" "A proxy answers a read version without asking a log server." ["I4"],
    ClaimOwnDurable "P22" "A log server takes what is durable on itself for committed." ["I11"],
    IgnoreSyncError "P25" "A log server takes a failed barrier for a good one." ["I7" "I8" "O5" "I3"],
    TrimFurther "P27" "A log server trims all that is committed, whatever was asked." ["I13"],
    IdsLost "P30" "A log server does not read its ids back when it opens." ["I16" "O5"],
    NewIdOnRetry "P31" "A client tries an unknown outcome again under a new id." ["I16"],
    HoleCounts "P32" "A log server takes a push whose predecessor is missing." ["I1"],
    DeadRoleIgnored "P35" "A leader does not notice when a node goes away." ["O16"],
    Storm "P37" "A proxy looks for what is unanswered without a pause." ["O15"],
    TrimUnpersisted "M01" "A log server answers a trim before it is persisted." ["I13"],
    ServeUncommitted "M02" "A log server gives consumers what is durable on itself." ["I11"],
    ThroughTooFar "M03" "A log server says that an answer cut off is complete." ["I12" "O11" "workload"],
    FindTooEarly "M04" "A log server answers for an id before it knows the version." ["I16" "O5"],
    RecycleLive "M05" "A log server recycles a segment with a live block." ["I13"],
    StaleRound "M06" "A proxy answers a question with a round of proof that began before it." ["I4"],
    CachedRead "M07" "A client answers a read version with the newest one that it has seen." ["I4"],
    ForgetOutcomes "M08" "A proxy takes a request that is settled for a new one." ["I15" "I16" "O5"],
    LaneGoesOn "M09" "A proxy goes on with a lane that is broken." ["workload"],
    NoEmptyPush "M10" "A proxy pushes nothing to log servers that hold no block of a version." ["O16"],
    FreshPairAgain "M11" "A sequencer answers a repeated request with a new pair." ["O16" "I1"],
    TrustIndeterminate "M12" "A leader takes a write with an unknown outcome for a good one." ["I10"],
    ChainSkips "M13" "A sequencer names the wrong predecessor once in fifty times." ["I1"],
    DecideUnsettled "M14" "A resolver does not wait for another proxy's write that is not settled." ["O1"],
    KeepAborted "M15" "A resolver keeps the writes of what another one aborted." ["O2"],
    SettleWrongBatch "M16" "A resolver takes a settlement for that of the proxy's next batch." ["O1" "O2"],
    OwnIgnored "M17" "A proxy forgets its own writes that a resolver left to it." ["O1"],
    NeverSettleAgain "M18" "A proxy does not send a settlement again that was lost." ["O16"],
    TooFewLocked "R01" "A leader goes on with one log server less than must be locked." ["I9" "O5" "I3"],
    AbsentNotCounted "R02" "A leader does not count the absent among those who may lack copies." ["I9" "O5"],
    ConfirmedByOne "R03" "A proxy takes one log server's word for a read version." ["I4"],
    LockAllThereIs "R04" "A log server answers a lock with what an epoch wrote that came to nothing."
        ["I9" "I12" "halted"],
    ClaimUnwritten "R05" "A log server takes claims of an epoch that is not in the register." ["I11" "I10"],
    LostIsWritten "R06" "A leader takes a lost compare-and-set for a good one." ["I10"],
    PublishUnproven "R07" "A leader publishes an epoch before its recovery transaction." ["I10" "halted"],
    IdsDropped "R08" "A log server forgets its ids when an epoch begins." ["I16" "O5"],
    NobodyFollows "R09" "A candidate does not take over from a silent leader." ["O16"],
    SharesMove "R10" "A proxy places blocks as if there were no absent log servers." ["I12" "O5"],
    KeepVoid "R11" "A log server that catches up keeps what was never committed."
        ["O10" "I12" "O7" "O11" "halted"],
    KeepVoidCopies "R12" "One that catches up keeps copies for an epoch that came to nothing."
        ["O10" "I12" "O7"],
    ReturnUnasked "R13" "One that returns does not ask a locked source for the last trims." ["I13"],
    TrimsNotAdopted "R14" "One that catches up does not adopt trims." ["I13" "halted"],
    TrimWhileLocked "R16" "A log server takes trims from its lock to the next epoch's begin." ["I13"],
    CopyUncommitted "R17" "A log server copies what is not committed." ["I11" "O10" "O7"],
    CopyLess "R18" "A log server copies only what the asker is the first holder of." ["I12" "O11"],
    FirstCopyOnly "R19" "One that catches up takes the first answer for all." ["I12" "halted" "O11"],
    ReturnServes "R20" "One that returns serves copies that are not certain." ["I11"],
    SeatByNumber "R22" "An heir is placed by its own number." ["I12" "O5" "O11"],
    IdsNotCopied "R21" "One that catches up does not remember the ids that it copies." ["I16" "O5"],
    MendUncompared "S01" "A log server mends a block with another one, and does not compare." ["O7"],
    MendAlone "S02" "A log server that mends a block writes zeros around it." ["O7" "halted"],
    ScrubBlind "S03" "A log server reads its log through and passes damage over." ["O7"],
}

/// The planted bugs that are on.
#[derive(Clone, Copy, Default, PartialEq, Eq, Hash, Debug)]
pub struct Plants(u128);

const _: () = assert!(Plant::ALL.len() <= 128, "a bit for each");

impl Plants {
    /// None.
    pub const NONE: Self = Self(0);

    /// Only this one.
    #[must_use]
    pub const fn only(plant: Plant) -> Self {
        Self(1 << plant as u64)
    }

    /// Whether it is on.
    #[must_use]
    pub const fn has(self, plant: Plant) -> bool {
        self.0 & (1 << plant as u64) != 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_unique_and_bits_do_not_meet() {
        let ids: std::collections::BTreeSet<_> =
            Plant::ALL.iter().map(|plant| plant.id()).collect();
        assert_eq!(ids.len(), Plant::ALL.len());
        for plant in Plant::ALL {
            let on = Plant::ALL.iter().filter(|other| Plants::only(*plant).has(**other));
            assert_eq!(on.collect::<Vec<_>>(), [plant]);
            assert!(!Plants::NONE.has(*plant));
        }
    }
}
