//! Buffers that one batch leaves to the next: what a batch takes is returned before it ends.
//!
//! Big allocations once a batch make the allocator tidy up after everybody else's small ones. A copy of a
//! set begins without buffers.

use core::fmt;

use super::batch::Layout;
use super::run::Query;

#[derive(Default)]
pub(super) struct Scratch {
    pub(super) layout: Layout<'static>,
    pub(super) met: Vec<bool>,
    pub(super) queries: Vec<Query<'static>>,
}

impl Clone for Scratch {
    fn clone(&self) -> Self {
        Self::default()
    }
}

impl fmt::Debug for Scratch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Scratch")
    }
}

/// The same allocation, empty, for items with another lifetime: collecting in place keeps it.
pub(super) fn emptied<A, B>(mut items: Vec<A>) -> Vec<B> {
    items.clear();
    items.into_iter().map(|_| unreachable!("it was cleared")).collect()
}

#[cfg(test)]
mod tests {
    use super::emptied;

    #[test]
    fn an_emptied_list_keeps_its_memory() {
        let text = String::from("a text");
        let borrowed: Vec<&str> = vec![&text; 1000];
        let again: Vec<&'static str> = emptied(borrowed);
        assert!(again.is_empty() && again.capacity() >= 1000, "{}", again.capacity());
    }
}
