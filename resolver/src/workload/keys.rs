//! The keys of the workloads.

use super::draw::{SplitMix, Zipf, mix};

/// A range with keys of its own; without an end it is a point.
#[derive(Clone, Debug)]
pub(super) struct Span {
    pub(super) begin: Vec<u8>,
    pub(super) end: Option<Vec<u8>>,
}

impl Span {
    pub(super) const fn point(begin: Vec<u8>) -> Self {
        Self { begin, end: None }
    }
}

/// What keys look like.
#[derive(Clone, Copy, Debug)]
pub(super) enum Keys {
    /// 16 bytes: 12 dots, then the id.
    Dots { ids: u64 },
    /// 16 bytes that look random.
    Scattered { ids: u64 },
    /// The same, a few of them most of the time.
    Zipfian { ids: u64 },
    /// 32 bytes: 20 that all share, then the id.
    Prefixed { ids: u64 },
    /// 32 bytes: 16 of the tenant, 8 that all share, then the id.
    Tenants { tenants: u64, ids: u64 },
    /// 10 KiB: the last 16 bytes look random.
    Long { ids: u64 },
}

const LONG_BYTES: usize = 10 << 10;
const SHARED: &[u8; 20] = b"/accounts/by-number/";

impl Keys {
    /// How many keys in order ranges are drawn from.
    pub(super) const fn ids(self) -> u64 {
        match self {
            Self::Dots { ids }
            | Self::Scattered { ids }
            | Self::Zipfian { ids }
            | Self::Prefixed { ids }
            | Self::Tenants { ids, .. }
            | Self::Long { ids } => ids,
        }
    }

    pub(super) fn zipf(self) -> Option<Zipf> {
        match self {
            Self::Zipfian { ids } => Some(Zipf::new(ids)),
            _ => None,
        }
    }

    pub(super) fn point(self, rng: &mut SplitMix, zipf: Option<&Zipf>) -> Vec<u8> {
        let id = match zipf {
            Some(zipf) => zipf.draw(rng),
            None => rng.below(self.ids()),
        };
        let tenant = self.tenant(rng);
        self.key(tenant, id)
    }

    /// A range of at least `least` ids and of fewer than `least + more`, within one tenant.
    pub(super) fn span(self, rng: &mut SplitMix, least: u64, more: u64) -> Span {
        let tenant = self.tenant(rng);
        let begin = rng.below(self.ids());
        let mut end = begin + least + rng.below(more);
        if matches!(self, Self::Tenants { .. }) {
            end = end.min(self.ids());
        }
        Span { begin: self.key(tenant, begin), end: Some(self.key(tenant, end)) }
    }

    fn tenant(self, rng: &mut SplitMix) -> u64 {
        match self {
            Self::Tenants { tenants, .. } => rng.below(tenants),
            _ => 0,
        }
    }

    fn key(self, tenant: u64, id: u64) -> Vec<u8> {
        let scattered = || [mix(id).to_be_bytes(), mix(id ^ 0x5555_5555).to_be_bytes()].concat();
        match self {
            Self::Dots { .. } => {
                let id = u32::try_from(id).expect("ids of dotted keys have 32 bits");
                [&[b'.'; 12][..], &id.to_be_bytes()].concat()
            }
            Self::Scattered { .. } | Self::Zipfian { .. } => scattered(),
            Self::Prefixed { .. } => {
                let (high, low) = (id >> 2, (id & 3) as u32);
                [&SHARED[..], &high.to_be_bytes(), &low.to_be_bytes()].concat()
            }
            Self::Tenants { .. } => {
                let tenant = [mix(tenant).to_be_bytes(), mix(!tenant).to_be_bytes()].concat();
                [&tenant[..], b"/tbl/01/", &id.to_be_bytes()].concat()
            }
            Self::Long { .. } => [vec![b'x'; LONG_BYTES - 16], scattered()].concat(),
        }
    }
}
