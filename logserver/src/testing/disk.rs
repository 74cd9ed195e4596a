//! A disk in memory: volatile until a barrier, torn by a crash.
//!
//! ```text
//! request --> lane log --------.
//!             lane background --+--> complete(prng): one of the fronts, or any read
//!             reads -----------'
//! page:  durable | written, written, ...       a barrier makes the last one durable
//!        crash:  one of them, or a mix of sectors of the last two
//! ```

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use bytes::Bytes;
use common::Prng;
use common::disk::{
    DiskCompletion, DiskError, DiskOp, DiskOutput, DiskRequest, File, Lane, PAGE_BYTES,
};

const PAGE: usize = PAGE_BYTES as usize;
const SECTOR: usize = 512;

#[derive(Clone, Debug, Default)]
struct FileState {
    durable: Vec<u8>,
    /// By page: what was written since the last barrier.
    written: BTreeMap<usize, Vec<Bytes>>,
    /// Pages of those that a failed barrier gave up: only a new write makes them durable.
    given_up: BTreeSet<usize>,
}

/// A disk in memory.
#[derive(Clone, Debug)]
pub struct MemoryDisk {
    files: BTreeMap<File, FileState>,
    log_lane: VecDeque<DiskRequest>,
    background_lane: VecDeque<DiskRequest>,
    reads: Vec<DiskRequest>,
    capacity_bytes: u64,
    /// The write of that many requests from now fails.
    fail_write_in: Option<u64>,
    /// Pages that can't be read.
    unreadable: BTreeSet<(File, u64)>,
}

impl MemoryDisk {
    /// An empty disk with room for files of `capacity_bytes`.
    #[must_use]
    pub const fn new(capacity_bytes: u64) -> Self {
        Self {
            files: BTreeMap::new(),
            log_lane: VecDeque::new(),
            background_lane: VecDeque::new(),
            reads: Vec::new(),
            capacity_bytes,
            fail_write_in: None,
            unreadable: BTreeSet::new(),
        }
    }

    /// Changes how much room there is.
    pub const fn set_capacity(&mut self, capacity_bytes: u64) {
        self.capacity_bytes = capacity_bytes;
    }

    /// Lets the write after `count` more ones fail.
    pub const fn fail_write_in(&mut self, count: u64) {
        self.fail_write_in = Some(count);
    }

    /// Takes a request.
    pub fn request(&mut self, request: DiskRequest) {
        match (&request.op, request.lane) {
            (DiskOp::Read { .. } | DiskOp::List, _) => self.reads.push(request),
            (_, Lane::Log) => self.log_lane.push_back(request),
            (_, Lane::Background) => self.background_lane.push_back(request),
        }
    }

    /// Whether nothing waits.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.log_lane.is_empty() && self.background_lane.is_empty() && self.reads.is_empty()
    }

    /// Requests that wait on the log lane.
    #[must_use]
    pub fn log_lane_len(&self) -> usize {
        self.log_lane.len()
    }

    /// Carries out one of the requests that may be next.
    pub fn complete(&mut self, prng: &mut Prng) -> Option<DiskCompletion> {
        let lanes = [!self.log_lane.is_empty(), !self.background_lane.is_empty()];
        let lane_count = lanes.iter().filter(|lane| **lane).count();
        let total = lane_count + self.reads.len();
        if total == 0 {
            return None;
        }
        let pick = prng.below(total as u64) as usize;
        let request = if pick >= lane_count {
            self.reads.swap_remove(pick - lane_count)
        } else if pick == 0 && lanes[0] {
            self.log_lane.pop_front()?
        } else {
            self.background_lane.pop_front()?
        };
        Some(DiskCompletion { id: request.id, result: self.carry_out(request.op) })
    }

    /// Carries out the next request of the log lane, however long the background lane waits.
    pub fn complete_log_lane(&mut self) -> Option<DiskCompletion> {
        let request = self.log_lane.pop_front()?;
        Some(DiskCompletion { id: request.id, result: self.carry_out(request.op) })
    }

    fn carry_out(&mut self, op: DiskOp) -> Result<DiskOutput, DiskError> {
        match op {
            DiskOp::List => {
                let files = self.files.iter().map(|(file, state)| (*file, state.len())).collect();
                Ok(DiskOutput::Listing { files, free_bytes: self.free_bytes() })
            }
            DiskOp::Create { file, bytes } => {
                let replaced = self.files.get(&file).map_or(0, FileState::len);
                if bytes > self.free_bytes() + replaced {
                    return Err(DiskError::Full);
                }
                self.files.insert(file, FileState::zeros(bytes));
                Ok(DiskOutput::Done)
            }
            DiskOp::Rename { from, to } => {
                let state = self.files.remove(&from).ok_or(DiskError::NotFound(from))?;
                self.files.insert(to, state);
                Ok(DiskOutput::Done)
            }
            DiskOp::Remove { file } => {
                self.files.remove(&file).ok_or(DiskError::NotFound(file))?;
                Ok(DiskOutput::Done)
            }
            DiskOp::Read { file, offset, bytes } => {
                assert!(offset.is_multiple_of(PAGE_BYTES) && bytes.is_multiple_of(PAGE_BYTES));
                let state = self.files.get(&file).ok_or(DiskError::NotFound(file))?;
                let pages = (file, offset / PAGE_BYTES)..(file, (offset + bytes) / PAGE_BYTES);
                if let Some((_, page)) = self.unreadable.range(pages).next() {
                    return Err(DiskError::Io { detail: format!("read: planted at page {page}") });
                }
                Ok(DiskOutput::Data(state.read(offset, bytes)))
            }
            DiskOp::Write { file, offset, data, durable } => {
                if let Some(left) = &mut self.fail_write_in {
                    if *left == 0 {
                        return Err(DiskError::Io { detail: "write: planted".to_owned() });
                    }
                    *left -= 1;
                }
                let can_grow = matches!(file, File::Meta(_));
                let state = self.files.get_mut(&file).ok_or(DiskError::NotFound(file))?;
                state.write(offset, &data.contiguous(), can_grow);
                // A bad sector that is written is another one from then on.
                let end = (offset + data.len() as u64).div_ceil(PAGE_BYTES);
                for page in offset / PAGE_BYTES..end {
                    self.unreadable.remove(&(file, page));
                }
                if durable {
                    state.sync();
                }
                Ok(DiskOutput::Done)
            }
        }
    }

    fn free_bytes(&self) -> u64 {
        let used: u64 = self.files.values().map(FileState::len).sum();
        self.capacity_bytes.saturating_sub(used)
    }

    /// The asker is gone, the power is not: nothing that waits is carried out.
    pub fn forget(&mut self) {
        self.log_lane.clear();
        self.background_lane.clear();
        self.reads.clear();
    }

    /// The asker dies: what waits is carried out in part or not at all, and nothing is synced by it.
    pub fn kill(&mut self, prng: &mut Prng) {
        for lane in
            [core::mem::take(&mut self.log_lane), core::mem::take(&mut self.background_lane)]
        {
            // Only the front of a lane can have begun.
            if let Some(request) = lane.into_iter().next()
                && prng.chance(2, 3)
            {
                self.begin(request.op, prng);
            }
        }
        self.reads.clear();
    }

    /// The write at the front of the log lane is carried out, its barrier fails, and nobody hears so.
    pub fn fail_barrier_unheard(&mut self) {
        let request = self.log_lane.pop_front().expect("a write waits");
        let DiskOp::Write { file, offset, data, durable: true } = request.op else {
            panic!("{:?} is no durable write", request.op)
        };
        let state = self.files.get_mut(&file).expect("the file exists");
        state.write(offset, &data.contiguous(), matches!(file, File::Meta(_)));
        state.given_up = state.written.keys().copied().collect();
    }

    /// A power cut: also, what was not synced is kept, lost or torn page by page.
    pub fn crash(&mut self, prng: &mut Prng) {
        self.kill(prng);
        self.fail_write_in = None;
        self.files.values_mut().for_each(|state| state.crash(prng));
    }

    fn begin(&mut self, op: DiskOp, prng: &mut Prng) {
        match op {
            DiskOp::Create { file, bytes } => {
                let bytes = prng.between(0, bytes / PAGE_BYTES) * PAGE_BYTES;
                if bytes <= self.free_bytes() {
                    self.files.insert(file, FileState::zeros(bytes));
                }
            }
            DiskOp::Write { file, offset, data, .. } => {
                let can_grow = matches!(file, File::Meta(_));
                if let Some(state) = self.files.get_mut(&file) {
                    state.write(offset, &data.contiguous(), can_grow);
                }
            }
            op => {
                let _ = self.carry_out(op);
            }
        }
    }

    /// All files and their lengths.
    pub fn files(&self) -> impl Iterator<Item = (File, u64)> {
        self.files.iter().map(|(file, state)| (*file, state.len()))
    }

    /// Whether a power cut could take something of the file.
    #[must_use]
    pub fn is_unsynced(&self, file: File) -> bool {
        self.files.get(&file).is_some_and(|state| !state.written.is_empty())
    }

    /// What a reader would find.
    #[must_use]
    pub fn peek(&self, file: File, offset: u64, bytes: u64) -> Bytes {
        self.files[&file].read(offset, bytes)
    }

    /// Rot: changes one durable byte.
    pub fn flip(&mut self, file: File, at: u64) {
        let state = self.files.get_mut(&file).expect("the file exists");
        assert!(state.written.is_empty(), "{file:?} is not synced");
        state.durable[at as usize] ^= 0x5a;
    }

    /// A latent error: a page of the file can't be read.
    pub fn spoil(&mut self, file: File, page: u64) {
        self.unreadable.insert((file, page));
    }

    /// Somebody removed the file.
    pub fn lose(&mut self, file: File) {
        self.files.remove(&file).expect("the file exists");
    }
}

impl FileState {
    fn zeros(bytes: u64) -> Self {
        Self { durable: vec![0; bytes as usize], ..Self::default() }
    }

    fn len(&self) -> u64 {
        let written = self.written.keys().next_back().map_or(0, |page| (page + 1) * PAGE);
        self.durable.len().max(written) as u64
    }

    fn page(&self, page: usize) -> Bytes {
        if let Some(last) = self.written.get(&page).and_then(|versions| versions.last()) {
            return last.clone();
        }
        let start = (page * PAGE).min(self.durable.len());
        let end = (start + PAGE).min(self.durable.len());
        let mut bytes = self.durable[start..end].to_vec();
        bytes.resize(PAGE, 0);
        bytes.into()
    }

    fn read(&self, offset: u64, bytes: u64) -> Bytes {
        let end = (offset + bytes).min(self.len());
        let pages = (offset / PAGE_BYTES) as usize..end.div_ceil(PAGE_BYTES) as usize;
        let mut out = Vec::with_capacity(bytes as usize);
        pages.for_each(|page| out.extend_from_slice(&self.page(page)));
        out.into()
    }

    fn write(&mut self, offset: u64, data: &[u8], can_grow: bool) {
        assert!(offset.is_multiple_of(PAGE_BYTES), "a write at {offset}");
        let end = offset + data.len() as u64;
        assert!(can_grow || end <= self.len(), "a write up to {end} of {}", self.len());
        for (place, chunk) in data.chunks(PAGE).enumerate() {
            let mut page = chunk.to_vec();
            page.resize(PAGE, 0);
            let place = offset as usize / PAGE + place;
            self.given_up.remove(&place);
            self.written.entry(place).or_default().push(page.into());
        }
    }

    fn sync(&mut self) {
        let (given_up, written) = core::mem::take(&mut self.written)
            .into_iter()
            .partition(|(p, _)| self.given_up.contains(p));
        self.written = given_up;
        let written: BTreeMap<usize, Vec<Bytes>> = written;
        for (page, versions) in written {
            let last = versions.last().expect("a written page has a version");
            self.put(page, last);
        }
    }

    fn put(&mut self, page: usize, bytes: &[u8]) {
        let (start, end) = (page * PAGE, (page + 1) * PAGE);
        if self.durable.len() < end {
            self.durable.resize(end, 0);
        }
        self.durable[start..end].copy_from_slice(bytes);
    }

    fn crash(&mut self, prng: &mut Prng) {
        self.given_up.clear();
        for (page, versions) in core::mem::take(&mut self.written) {
            let last = versions.last().expect("a written page has a version").clone();
            match prng.below(4) {
                0 => {}
                1 => {
                    let torn = self.torn(page, &last, prng);
                    self.put(page, &torn);
                }
                _ => {
                    let version = prng.pick(&versions).clone();
                    self.put(page, &version);
                }
            }
        }
    }

    fn torn(&self, page: usize, new: &[u8], prng: &mut Prng) -> Vec<u8> {
        let start = (page * PAGE).min(self.durable.len());
        let end = (start + PAGE).min(self.durable.len());
        let mut bytes = self.durable[start..end].to_vec();
        bytes.resize(PAGE, 0);
        for (old, new) in bytes.chunks_mut(SECTOR).zip(new.chunks(SECTOR)) {
            if prng.chance(1, 2) {
                old.copy_from_slice(new);
            }
        }
        bytes
    }
}
