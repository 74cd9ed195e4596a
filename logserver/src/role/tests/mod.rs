//! The role on a disk in memory.

mod catch_up;
mod crash;
mod damage;
mod epoch;
mod ids;
mod pull;
mod push;
mod space;
mod trim;
