//! The role on a disk in memory.

mod catch_up;
mod crash;
mod damage;
mod epoch;
mod ids;
mod mend;
mod pull;
mod push;
mod scrub;
mod space;
mod trim;
