//! The fault atlas: which durable pages may be harmed, so that the simulator never asks for what nobody could
//! give.
//!
//! ```text
//! segment  | header | group 1 | group 2 | ... | group n |  footer | trailer |
//!            costs    may be harmed: a later    never:     costs nothing, once
//!            nothing  group proves that it      a torn     a later segment is
//!                     was durable               flush?     there
//! meta     the older slot only: the newer one is the only copy of locks and trims
//! ```
//!
//! - *Damage must be tellable from a crash.* The last flush group of a log can be torn by a power cut, and
//!   damage in it looks the same. It is never harmed.
//! - *Some copy stays whole.* Versions are looked at in windows. Of each window fewer log servers than copies
//!   are harmed at a time; what is left serves every reader, and mends what is harmed. Where a node has
//!   mended all, it, or another one, may be harmed again.
//! - *With one copy nothing survives, so nothing may be silent.* It may be harmed nowhere else either; what
//!   it must come to is a refusal or a halt that names it. The simulator then plays the operator, and puts
//!   the page back.

use std::collections::{BTreeMap, BTreeSet};

use bytes::Bytes;
use common::disk::{DiskOp, DiskRequest, File, PAGE_BYTES, padded};
use common::{NodeId, Prng, StreamId, Version};

use crate::disk::Disk;
use crate::oracle::{bodies_in, frames_in};

/// Versions of one window: about a second's.
const WINDOW_VERSIONS: u64 = 1 << 20;
/// Where a meta slot has its generation.
const GENERATION_AT: usize = 16;

/// A frame, where it was written.
#[derive(Clone, Debug)]
struct Placed {
    version: Version,
    bytes: u64,
    /// What was to be written: a crash may have kept it from the disk, or a footer may lie there now.
    content: Bytes,
    /// Frames of one write have one number.
    group: u64,
}

type Frames = BTreeMap<(File, u64), Placed>;

/// A block, where it was written.
#[derive(Clone, Debug)]
pub(crate) struct Block {
    pub(crate) stream: StreamId,
    pub(crate) version: Version,
    pub(crate) file: File,
    pub(crate) at: u64,
    /// Its body.
    pub(crate) bytes: Bytes,
}

/// A page that may be harmed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Victim {
    /// The file.
    pub file: File,
    /// The page in it.
    pub page: u64,
}

/// Where frames lie, and which windows have been harmed where.
#[derive(Clone, Debug)]
pub struct Atlas {
    copies: usize,
    groups: u64,
    frames: BTreeMap<NodeId, Frames>,
    harmed: BTreeMap<u64, BTreeSet<NodeId>>,
    /// Whose disk names its node for sure.
    opened: BTreeSet<NodeId>,
}

impl Placed {
    fn blocks(&self, file: File, at: u64) -> Vec<Block> {
        let bodies = bodies_in(&self.content).into_iter();
        let block = |(stream, from, bytes)| Block {
            stream,
            version: self.version,
            file,
            at: at + from,
            bytes,
        };
        bodies.map(block).collect()
    }

    fn is_on(&self, disk: &Disk, file: File, at: u64) -> bool {
        let begin = at % PAGE_BYTES;
        let pages = disk.peek(file, at - begin, padded(begin + self.bytes));
        let found = pages.and_then(|pages| {
            let end = (begin + self.bytes) as usize;
            pages.get(begin as usize..end).map(|found| found == self.content)
        });
        found.unwrap_or(false)
    }
}

impl Atlas {
    /// The atlas of a run with so many copies of each stream.
    #[must_use]
    pub fn new(copies: u8) -> Self {
        Self {
            copies: usize::from(copies),
            groups: 0,
            frames: BTreeMap::new(),
            harmed: BTreeMap::new(),
            opened: BTreeSet::new(),
        }
    }

    /// A log server has opened its directory.
    pub fn opened(&mut self, node: NodeId) {
        self.opened.insert(node);
    }

    /// Whether it ever has.
    #[must_use]
    pub fn has_opened(&self, node: NodeId) -> bool {
        self.opened.contains(&node)
    }

    /// Whether readers can do without what is harmed.
    #[must_use]
    pub const fn is_survivable(&self) -> bool {
        self.copies > 1
    }

    /// A log server gives a write to its disk.
    pub fn wrote(&mut self, node: NodeId, request: &DiskRequest) {
        let DiskOp::Write { file, offset, data, .. } = &request.op else { return };
        self.groups += 1;
        let frames = self.frames.entry(node).or_default();
        let data = data.contiguous();
        for (version, at, bytes) in frames_in_write(&data) {
            let content = data.slice(at as usize..data.len().min((at + bytes) as usize));
            let placed = Placed { version, bytes, content, group: self.groups };
            frames.insert((*file, offset + at), placed);
        }
    }

    /// A page of a node's disk that may be harmed now; from then on it counts as harmed.
    pub fn choose(&mut self, node: NodeId, disk: &Disk, prng: &mut Prng) -> Option<Victim> {
        let kind = prng.below(8);
        if kind == 0 {
            return older_meta(disk);
        }
        self.forget_gone(node, disk);
        if kind == 1 {
            return self.redundant(node, disk, prng);
        }
        let (victim, windows) = self.provable(node, disk, prng)?;
        for window in windows {
            self.harmed.entry(window).or_default().insert(node);
        }
        Some(victim)
    }

    /// A node has mended something: it may be harmed again wherever nothing that it holds is harmed now.
    pub fn mended(&mut self, node: NodeId, disk: &Disk) {
        let pages: BTreeSet<_> = disk.harmed().chain(disk.misdirection()).collect();
        let frames = self.frames.get(&node);
        let still: BTreeSet<u64> = pages
            .iter()
            .flat_map(|(file, page)| frames.into_iter().flat_map(|of| in_page(of, *file, *page)))
            .map(|(_, placed)| placed.version.0 / WINDOW_VERSIONS)
            .collect();
        for (window, nodes) in &mut self.harmed {
            if !still.contains(window) {
                nodes.remove(&node);
            }
        }
    }

    /// The blocks of a version that a node was given to write.
    pub(crate) fn blocks(&self, node: NodeId, version: Version) -> Vec<Block> {
        let frames = self.frames.get(&node).into_iter().flatten();
        let frames = frames.filter(|(_, placed)| placed.version == version);
        frames.flat_map(|((file, at), placed)| placed.blocks(*file, *at)).collect()
    }

    /// The blocks that a page of a node's disk was to hold a part of.
    pub(crate) fn blocks_in(&self, node: NodeId, file: File, page: u64) -> Vec<Block> {
        let Some(frames) = self.frames.get(&node) else { return Vec::new() };
        let blocks = in_page(frames, file, page).flat_map(|((file, at), of)| of.blocks(*file, *at));
        let (begin, end) = (page * PAGE_BYTES, (page + 1) * PAGE_BYTES);
        blocks
            .filter(|block| block.at < end && block.at + block.bytes.len() as u64 > begin)
            .collect()
    }

    /// What a page of a node's disk was to hold: pieces of frames, their versions, and where they begin.
    pub(crate) fn pieces_in(
        &self,
        node: NodeId,
        file: File,
        page: u64,
    ) -> Vec<(Version, u64, Bytes)> {
        let Some(frames) = self.frames.get(&node) else { return Vec::new() };
        let (begin, end) = (page * PAGE_BYTES, (page + 1) * PAGE_BYTES);
        let pieces = in_page(frames, file, page).map(|((_, at), placed)| {
            let (from, to) = (begin.max(*at), end.min(at + placed.content.len() as u64));
            let piece = placed.content.slice((from - at) as usize..(to.max(from) - at) as usize);
            (placed.version, from, piece)
        });
        pieces.collect()
    }

    fn forget_gone(&mut self, node: NodeId, disk: &Disk) {
        let frames = self.frames.entry(node).or_default();
        frames.retain(|(file, _), _| disk.contains(*file));
    }

    /// A page of a frame behind which another group is durable.
    fn provable(
        &self,
        node: NodeId,
        disk: &Disk,
        prng: &mut Prng,
    ) -> Option<(Victim, BTreeSet<u64>)> {
        let frames = self.frames.get(&node)?;
        let is_durable = |(file, at): (File, u64), placed: &Placed| {
            disk.would_survive(file, at, placed.bytes) && placed.is_on(disk, file, at)
        };
        let durable: Vec<_> =
            frames.iter().filter(|(place, placed)| is_durable(**place, placed)).collect();
        // Behind damage an opening finds frames where pages begin. What is left of a torn group behind its
        // first frame proves nothing.
        let starts_a_page = |((_, at), _): &&(&(File, u64), &Placed)| at % PAGE_BYTES == 0;
        let (_, proof) = *durable.iter().rev().find(starts_a_page)?;
        let is_proven = |placed: &Placed| placed.group < proof.group;
        let candidates: Vec<_> =
            durable.iter().copied().filter(|(_, placed)| is_proven(placed)).collect();
        if candidates.is_empty() {
            return None;
        }
        let (&(file, at), placed) = *prng.pick(&candidates);
        let (first, end) = (at / PAGE_BYTES, (at + placed.bytes).div_ceil(PAGE_BYTES));
        let page = prng.between(first, end - 1);
        let frames = in_page(frames, file, page);
        let windows: BTreeSet<u64> =
            frames.map(|(_, placed)| placed.version.0 / WINDOW_VERSIONS).collect();
        let is_allowed = windows.iter().all(|window| self.may_harm(*window, node));
        is_allowed.then_some((Victim { file, page }, windows))
    }

    /// With one copy there is no other; what follows must be loud.
    fn may_harm(&self, window: u64, node: NodeId) -> bool {
        let harmed = self.harmed.get(&window);
        let others = harmed.map_or(0, |of| of.iter().filter(|other| **other != node).count());
        self.copies == 1 || others + 1 < self.copies
    }

    /// A page around the frames of a segment behind which another one has frames.
    fn redundant(&self, node: NodeId, disk: &Disk, prng: &mut Prng) -> Option<Victim> {
        let frames = self.frames.get(&node)?;
        let files: BTreeSet<File> = frames.keys().map(|(file, _)| *file).collect();
        let last = *files.last()?;
        let file = *files.iter().nth(prng.below(files.len() as u64) as usize)?;
        if file == last {
            return None;
        }
        let of_file = frames.range((file, 0)..=(file, u64::MAX));
        let end = of_file.map(|((_, at), placed)| at + placed.bytes).max()?.div_ceil(PAGE_BYTES);
        let pages = disk.length(file) / PAGE_BYTES;
        let page = if prng.chance(1, 4) { 0 } else { prng.between(end.min(pages - 1), pages - 1) };
        disk.would_survive(file, page * PAGE_BYTES, PAGE_BYTES).then_some(Victim { file, page })
    }
}

/// The frames that a page holds a part of.
fn in_page(
    frames: &Frames,
    file: File,
    page: u64,
) -> impl Iterator<Item = (&(File, u64), &Placed)> {
    let before_end = frames.range((file, 0)..(file, (page + 1) * PAGE_BYTES));
    before_end.filter(move |((_, at), of)| at + of.bytes > page * PAGE_BYTES)
}

/// The slot that the next write goes to.
fn older_meta(disk: &Disk) -> Option<Victim> {
    let generation = |slot| {
        let page = disk.peek(File::Meta(slot), 0, PAGE_BYTES)?;
        let bytes = page.get(GENERATION_AT..GENERATION_AT + 8)?;
        Some(u64::from_le_bytes(bytes.try_into().expect("eight bytes")))
    };
    let (one, other) = (generation(0)?, generation(1)?);
    let older = u8::from(other < one);
    let is_settled = one.min(other) > 0 && disk.would_survive(File::Meta(older), 0, PAGE_BYTES);
    is_settled.then_some(Victim { file: File::Meta(older), page: 0 })
}

fn frames_in_write(data: &Bytes) -> Vec<(Version, u64, u64)> {
    let frames = frames_in(data).into_iter();
    frames.map(|found| (found.version, found.offset, found.bytes)).collect()
}

#[cfg(test)]
#[path = "atlas_tests.rs"]
mod tests;
