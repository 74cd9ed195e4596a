//! What lies on a simulated disk: pages in a volatile cache above pages that are durable.
//!
//! ```text
//! write --> cache (current) --barrier--> durable          power cut: each sector of a page that no barrier
//!              |                            |             has covered is old, new or garbage, on its own;
//!              `-- read                     |             one overwritten with what it held stays
//!                                           `-- what a power cut is sure to leave
//! ```

use std::collections::{BTreeMap, BTreeSet};

use bytes::{Bytes, BytesMut};
use common::Prng;
use common::disk::{File, PAGE_BYTES};

const PAGE: usize = PAGE_BYTES as usize;
const SECTOR: usize = 512;
/// Older contents of an unsynced page that a power cut may bring back, at most.
const HISTORY_MAX: usize = 4;

/// What was never written.
static ZEROS: [u8; 64 * PAGE] = [0; 64 * PAGE];

/// One page; `None` is zeros.
type Page = Option<Bytes>;

/// A page that no barrier has covered since it was written.
#[derive(Clone, Debug)]
struct Dirty {
    /// What is durable, then what was written since, without the current content.
    history: Vec<Page>,
    /// The number of the last write to it.
    stamp: u64,
    /// A barrier over it has failed: no later one makes it durable, though the cache calls it clean.
    poisoned: bool,
    /// What the page below read as before it was written: a power cut may bring that back.
    harm: Option<Harm>,
}

impl Dirty {
    /// Whether every write to the page since it was durable brought what it held.
    fn holds_only(&self, current: Option<&Bytes>) -> bool {
        same_in_all(&self.history, current, 0..PAGE).is_some()
    }
}

/// What a page that was made durable reads as. Its true content stays beside it: oracles see that, and repair
/// brings it back.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Harm {
    /// With this bit of it flipped.
    Flipped(u32),
    /// As an error.
    Unreadable,
    /// As other bytes.
    Replaced(Option<Bytes>),
}

/// What a write brings.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum WriteKind {
    /// Something new: nobody needs what was there.
    New,
    /// What is there already, or should be.
    Again,
}

/// One file's content.
#[derive(Clone, Debug, Default)]
struct Content {
    pages: Vec<Page>,
    harms: BTreeMap<usize, Harm>,
    /// What pages held that were written while nobody could know all of it.
    scars: BTreeMap<usize, Page>,
    /// Pages that an operator has put back: who looked at them before may still write what it did not see.
    repaired: BTreeSet<usize>,
    /// Pages behind these are not durable as part of the file.
    durable_pages: usize,
    dirty: BTreeMap<usize, Dirty>,
}

/// The files of one directory.
#[derive(Clone, Debug, Default)]
pub(super) struct Platter {
    files: BTreeMap<File, Content>,
    stamp: u64,
}

impl Platter {
    pub(super) fn list(&self) -> Vec<(File, u64)> {
        self.files
            .iter()
            .map(|(file, content)| (*file, content.pages.len() as u64 * PAGE_BYTES))
            .collect()
    }

    pub(super) fn used_bytes(&self) -> u64 {
        self.files.values().map(|content| content.pages.len() as u64 * PAGE_BYTES).sum()
    }

    pub(super) fn contains(&self, file: File) -> bool {
        self.files.contains_key(&file)
    }

    pub(super) fn length(&self, file: File) -> u64 {
        self.files.get(&file).map_or(0, |content| content.pages.len() as u64 * PAGE_BYTES)
    }

    pub(super) fn create(&mut self, file: File, bytes: u64) {
        let pages = (bytes / PAGE_BYTES) as usize;
        let content =
            Content { pages: vec![None; pages], durable_pages: pages, ..Content::default() };
        self.files.insert(file, content);
    }

    /// `false` when there is no such file.
    pub(super) fn rename(&mut self, from: File, to: File) -> bool {
        match self.files.remove(&from) {
            None => false,
            Some(content) => {
                // Nobody needs anything of a spare.
                let scars =
                    if matches!(to, File::Spare(_)) { BTreeMap::new() } else { content.scars };
                self.files.insert(to, Content { scars, ..content });
                true
            }
        }
    }

    /// `false` when there is no such file.
    pub(super) fn remove(&mut self, file: File) -> bool {
        self.files.remove(&file).is_some()
    }

    /// The number of the last write so far: a barrier that begins now covers the writes up to it.
    pub(super) const fn stamp(&self) -> u64 {
        self.stamp
    }

    /// What the pages truly hold.
    pub(super) fn peek(&self, file: File, offset: u64, bytes: u64) -> Option<Bytes> {
        let content = self.files.get(&file)?;
        let pages = &content.pages[content.range(offset, bytes)];
        // Most reads are of one page, or of what nobody has written: neither is copied.
        match pages {
            [Some(page)] => return Some(page.clone()),
            _ if pages.len() <= ZEROS.len() / PAGE && pages.iter().all(Option::is_none) => {
                return Some(Bytes::from_static(&ZEROS[..pages.len() * PAGE]));
            }
            _ => {}
        }
        let mut out = BytesMut::with_capacity(pages.len() * PAGE);
        pages.iter().for_each(|page| append(&mut out, page.as_ref()));
        Some(out.freeze())
    }

    /// What a read brings: an unreadable page is an error.
    pub(super) fn read(&self, file: File, offset: u64, bytes: u64) -> Result<Bytes, ReadError> {
        let content = self.files.get(&file).ok_or(ReadError::NoFile)?;
        if content.harms.is_empty() {
            return self.peek(file, offset, bytes).ok_or(ReadError::NoFile);
        }
        let pages = content.range(offset, bytes);
        let mut out = BytesMut::with_capacity(pages.len() * PAGE);
        for place in pages {
            let page = content.pages[place].as_ref();
            match content.harms.get(&place) {
                None => append(&mut out, page),
                Some(Harm::Unreadable) => return Err(ReadError::Page(place)),
                Some(Harm::Replaced(other)) => append(&mut out, other.as_ref()),
                Some(Harm::Flipped(bit)) => {
                    let begin = out.len();
                    append(&mut out, page);
                    let bit = *bit as usize % (8 * PAGE);
                    out[begin + bit / 8] ^= 1 << (bit % 8);
                }
            }
        }
        Ok(out.freeze())
    }

    /// Harms a page; `false` when there is no such page.
    pub(super) fn harm(&mut self, file: File, page: usize, harm: Harm) -> bool {
        let Some(content) = self.files.get_mut(&file).filter(|of| page < of.pages.len()) else {
            return false;
        };
        content.harms.insert(page, harm);
        true
    }

    /// Pages that read as something else than they should hold.
    pub(super) fn harmed(&self) -> impl Iterator<Item = (File, u64)> {
        self.files.iter().flat_map(|(file, content)| {
            let pages = content.harms.keys().chain(content.scars.keys());
            pages.map(|page| (*file, *page as u64))
        })
    }

    /// Whether a page was written while nobody could know all of what it held.
    pub(super) fn is_scarred(&self, file: File, page: u64) -> bool {
        self.files.get(&file).is_some_and(|content| content.scars.contains_key(&(page as usize)))
    }

    /// Every page reads as what it should hold.
    pub(super) fn repair(&mut self) {
        for content in self.files.values_mut() {
            content.repaired.extend(content.harms.keys().chain(content.scars.keys()));
            content.harms.clear();
            for (page, original) in core::mem::take(&mut content.scars) {
                content.pages[page] = original;
            }
        }
    }

    /// Writes whole pages into the cache. `keep` says for each sector whether it arrives.
    pub(super) fn write(
        &mut self,
        file: File,
        offset: u64,
        data: &Bytes,
        kind: WriteKind,
        mut keep: impl FnMut() -> bool,
    ) {
        self.stamp += 1;
        let stamp = self.stamp;
        let Some(content) = self.files.get_mut(&file) else { return };
        let first = (offset / PAGE_BYTES) as usize;
        let count = data.len().div_ceil(PAGE);
        if content.pages.len() < first + count {
            content.pages.resize(first + count, None);
        }
        for place in 0..count {
            let new = page_of(data, place);
            let old = content.pages[first + place].clone();
            let kept: [bool; PAGE / SECTOR] = core::array::from_fn(|_| keep());
            let mixed = mix(&new, old.as_ref(), &kept);
            let (mixed, harm) = match kind {
                WriteKind::New => {
                    content.harms.remove(&(first + place));
                    content.scars.remove(&(first + place));
                    content.repaired.remove(&(first + place));
                    (mixed, None)
                }
                WriteKind::Again => content.overwrite(first + place, old.as_ref(), mixed, &kept),
            };
            let dirty = content.dirty.entry(first + place).or_insert(Dirty {
                history: Vec::new(),
                stamp,
                poisoned: false,
                harm: None,
            });
            dirty.harm = dirty.harm.take().or(harm);
            if dirty.history.len() < HISTORY_MAX {
                dirty.history.push(old);
            }
            dirty.stamp = stamp;
            dirty.poisoned = false;
            content.pages[first + place] = Some(mixed);
        }
    }

    /// A barrier over one file that began when the last write was `stamp`, and that write `own` belongs to.
    pub(super) fn barrier(&mut self, file: File, stamp: u64, own: u64) {
        let Some(content) = self.files.get_mut(&file) else { return };
        content
            .dirty
            .retain(|_, dirty| dirty.poisoned || (dirty.stamp > stamp && dirty.stamp != own));
        let behind = content.dirty.keys().next_back().map_or(0, |page| page + 1);
        if behind <= content.durable_pages {
            content.durable_pages = content.pages.len();
        }
    }

    /// A barrier that failed: what it should have covered stays lost for good, though it reads back well.
    pub(super) fn failed_barrier(&mut self, file: File) {
        if let Some(content) = self.files.get_mut(&file) {
            content.dirty.values_mut().for_each(|dirty| dirty.poisoned = true);
        }
    }

    /// Whether the bytes are sure to read back as they do now after a power cut at this moment.
    pub(super) fn would_survive(&self, file: File, offset: u64, bytes: u64) -> bool {
        let Some(content) = self.files.get(&file) else { return false };
        let first = (offset / PAGE_BYTES) as usize;
        let end = (offset + bytes).div_ceil(PAGE_BYTES) as usize;
        let mut dirty = content.dirty.range(first..end);
        end <= content.durable_pages
            && dirty.all(|(place, dirty)| dirty.holds_only(content.pages[*place].as_ref()))
    }

    /// Cuts the power: every sector that no barrier covers gets its fate.
    pub(super) fn power_cut(&mut self, prng: &mut Prng) {
        for content in self.files.values_mut() {
            let mood = Mood::draw(prng);
            for (place, dirty) in core::mem::take(&mut content.dirty) {
                let current = content.pages[place].take();
                content.pages[place] = fate(&dirty.history, current, mood, prng);
                if let Some(harm) = dirty.harm.filter(|_| prng.chance(1, 2)) {
                    content.harms.insert(place, harm);
                }
            }
            let (least, most) = (content.durable_pages, content.pages.len());
            if most > least {
                let kept = least + prng.below((most - least) as u64 + 1) as usize;
                content.pages.truncate(kept);
            }
            content.durable_pages = content.pages.len();
            let pages = content.pages.len();
            content.harms.retain(|page, _| *page < pages);
            content.scars.retain(|page, held| *page < pages && content.pages[*page] != *held);
        }
    }
}

impl Platter {
    /// Everything that decides what reads and power cuts will bring.
    pub(super) fn fingerprint(&self, take: &mut impl FnMut(u64)) {
        for (file, content) in &self.files {
            words(file.name().as_bytes(), take);
            take(content.pages.len() as u64);
            take(content.durable_pages as u64);
            for (place, page) in content.pages.iter().enumerate() {
                if let Some(page) = page {
                    take(place as u64);
                    words(page, take);
                }
            }
            for (place, dirty) in &content.dirty {
                take(*place as u64);
                take(dirty.stamp << 1 | u64::from(dirty.poisoned));
                for page in &dirty.history {
                    take(u64::from(page.is_some()));
                    words(page.as_deref().unwrap_or_default(), take);
                }
            }
        }
        take(self.stamp);
    }
}

/// Bytes as words, the last one padded.
pub(super) fn words(bytes: &[u8], take: &mut impl FnMut(u64)) {
    take(bytes.len() as u64);
    for chunk in bytes.chunks(8) {
        let mut word = [0; 8];
        word[..chunk.len()].copy_from_slice(chunk);
        take(u64::from_le_bytes(word));
    }
}

/// Why a read brings nothing.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum ReadError {
    NoFile,
    Page(usize),
}

impl Content {
    /// What becomes of a page's harm when it is written again: the page that is then held, and the harm that
    /// a write takes away.
    ///
    /// Who writes back what was read brings a flipped bit along: it stays what it is, a flipped bit. Who
    /// writes a page that could not be read makes up what it does not know: the page is scarred.
    fn overwrite(
        &mut self,
        page: usize,
        old: Option<&Bytes>,
        new: Bytes,
        kept: &[bool; PAGE / SECTOR],
    ) -> (Bytes, Option<Harm>) {
        let Some(harm) = self.harms.get(&page).cloned() else {
            if self.scars.get(&page).is_some_and(|held| held.as_ref() == Some(&new)) {
                self.scars.remove(&page);
            } else if self.repaired.contains(&page) && old != Some(&new) {
                self.scars.entry(page).or_insert_with(|| old.cloned());
            }
            return (new, None);
        };
        if let Harm::Flipped(bit) = harm {
            let at = bit as usize % (8 * PAGE) / 8;
            let held = old.cloned().unwrap_or_else(|| Bytes::from_static(&ZEROS[..PAGE]));
            let mut seen = BytesMut::from(&held[..]);
            seen[at] ^= 1 << (bit % 8);
            if new == seen {
                return (held, None);
            }
            if !kept[at / SECTOR] {
                return (new, None);
            }
        } else if !kept.iter().all(|kept| *kept) {
            // As if it had not begun.
            let zeros = || Bytes::from_static(&ZEROS[..PAGE]);
            return (old.cloned().unwrap_or_else(zeros), None);
        } else if old != Some(&new) {
            self.scars.entry(page).or_insert_with(|| old.cloned());
        }
        self.harms.remove(&page);
        (new, Some(harm))
    }

    fn range(&self, offset: u64, bytes: u64) -> core::ops::Range<usize> {
        let first = ((offset / PAGE_BYTES) as usize).min(self.pages.len());
        let last = (first + (bytes / PAGE_BYTES) as usize).min(self.pages.len());
        first..last
    }
}

fn append(out: &mut BytesMut, page: Option<&Bytes>) {
    match page {
        Some(page) => out.extend_from_slice(page),
        None => out.resize(out.len() + PAGE, 0),
    }
}

/// How a power cut treats a file: the extremes must be as likely as any mixture.
#[derive(Clone, Copy)]
enum Mood {
    AllOld,
    AllNew,
    ByPage,
    BySector,
    WithGarbage,
}

impl Mood {
    fn draw(prng: &mut Prng) -> Self {
        *prng.pick(&[Self::AllOld, Self::AllNew, Self::ByPage, Self::BySector, Self::WithGarbage])
    }
}

fn fate(history: &[Page], current: Page, mood: Mood, prng: &mut Prng) -> Page {
    let durable = history.first().cloned().flatten();
    let any = |prng: &mut Prng| match prng.below(history.len() as u64 + 1) as usize {
        at if at < history.len() => history[at].clone(),
        _ => current.clone(),
    };
    match mood {
        Mood::AllOld => durable,
        Mood::AllNew => current,
        Mood::ByPage => any(prng),
        Mood::BySector | Mood::WithGarbage => {
            let mut page = BytesMut::zeroed(PAGE);
            for sector in page.chunks_exact_mut(SECTOR).enumerate() {
                let (place, sector) = sector;
                let range = place * SECTOR..(place + 1) * SECTOR;
                if let Some(same) = same_in_all(history, current.as_ref(), range.clone()) {
                    sector.copy_from_slice(same);
                } else if matches!(mood, Mood::WithGarbage) && prng.chance(1, 3) {
                    for word in sector.chunks_exact_mut(8) {
                        word.copy_from_slice(&prng.next().to_le_bytes());
                    }
                } else if let Some(source) = any(prng) {
                    sector.copy_from_slice(&source[range]);
                }
            }
            Some(page.freeze())
        }
    }
}

/// A sector that was overwritten with what it holds: a device writes a sector whole or not at all (NVMe's
/// AWUPF is at least one block), so it still holds that. Garbage stands for what a cache makes of new
/// content.
fn same_in_all<'a>(
    history: &'a [Page],
    current: Option<&'a Bytes>,
    range: core::ops::Range<usize>,
) -> Option<&'a [u8]> {
    let sector = |page: Option<&'a Bytes>| &page.map_or(&ZEROS[..PAGE], |page| page)[range.clone()];
    let current = sector(current);
    history.iter().all(|page| sector(page.as_ref()) == current).then_some(current)
}

/// The `place`th page of `data`, padded with zeros.
pub(super) fn page_of(data: &Bytes, place: usize) -> Bytes {
    let (start, end) = (place * PAGE, ((place + 1) * PAGE).min(data.len()));
    if end - start == PAGE {
        return data.slice(start..end);
    }
    let mut page = BytesMut::zeroed(PAGE);
    page[..end - start].copy_from_slice(&data[start..end]);
    page.freeze()
}

fn mix(new: &Bytes, old: Option<&Bytes>, kept: &[bool; PAGE / SECTOR]) -> Bytes {
    if kept.iter().all(|kept| *kept) {
        return new.clone();
    }
    let mut page = BytesMut::from(&new[..]);
    for (sector, _) in kept.iter().enumerate().filter(|(_, kept)| !**kept) {
        let range = sector * SECTOR..(sector + 1) * SECTOR;
        match old {
            Some(old) => page[range.clone()].copy_from_slice(&old[range]),
            None => page[range].fill(0),
        }
    }
    page.freeze()
}
