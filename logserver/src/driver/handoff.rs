//! Work into a thread that may be asleep, and results out of it.
//!
//! ```text
//!  producer                          consumer thread
//!  push item                         swap(sleeping, true)
//!  swap(sleeping, false)             queue empty and not closed?
//!    was it true? raise signal         yes: wait for the signal
//!                                    swap(sleeping, false)
//! ```
//! Every access to `sleeping` is a read-modify-write that acquires and releases, so they have one order, and
//! each sees what was done before the earlier ones. A producer before the consumer's `true`: the consumer
//! sees its item. A producer after it: the producer sees the `true`, and raises the signal.
//!
//! The signal is sticky: raised before the wait, it ends the wait at once. Raised for a consumer that had
//! already found the work, it costs one more look at an empty queue.
//!
//! On the way out there is no flag: the waker is called once a batch, after the batch is in the queue, and
//! must itself be sticky (tokio's `Notify`, a thread's unpark token are). The reader drains until the queue
//! is empty before it waits.

use std::sync::Arc;

use self::primitives::{ArrayQueue, AtomicBool, Ordering, Signal};

/// Called after each batch of results. Must be sticky, cheap, and must not block.
pub type Waker = Arc<dyn Fn() + Send + Sync>;

/// Wakes one sleeping thread, without a system call while it is awake.
#[derive(Debug)]
pub(super) struct Doorbell {
    sleeping: AtomicBool,
    signal: Signal,
}

impl Doorbell {
    fn new() -> std::io::Result<Self> {
        Ok(Self { sleeping: AtomicBool::new(false), signal: Signal::new()? })
    }

    /// To be called after the work has been published.
    fn ring(&self) {
        if self.sleeping.swap(false, Ordering::AcqRel) {
            self.signal.raise();
        }
    }

    /// Calls `wait` unless there is work. `wait` returns after it has consumed the signal, or earlier.
    fn sleep(&self, idle: impl FnOnce() -> bool, wait: impl FnOnce(&Signal)) {
        self.sleeping.swap(true, Ordering::AcqRel);
        if idle() {
            wait(&self.signal);
        }
        self.sleeping.swap(false, Ordering::AcqRel);
    }
}

/// A bounded queue with one consumer thread that sleeps while it is empty.
#[derive(Debug)]
pub(super) struct Inbox<T> {
    queue: ArrayQueue<T>,
    closed: AtomicBool,
    bell: Doorbell,
}

impl<T> Inbox<T> {
    pub(super) fn new(capacity: usize) -> std::io::Result<Self> {
        Ok(Self {
            queue: ArrayQueue::new(capacity),
            closed: AtomicBool::new(false),
            bell: Doorbell::new()?,
        })
    }

    /// Gives the item back when the queue is full.
    pub(super) fn push(&self, item: T) -> Result<(), T> {
        self.queue.push(item)?;
        self.bell.ring();
        Ok(())
    }

    pub(super) fn pop(&self) -> Option<T> {
        self.queue.pop()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }

    /// Nothing will be pushed any more.
    pub(super) fn close(&self) {
        self.closed.store(true, Ordering::Release);
        self.bell.ring();
    }

    /// To be asked before the last look at the queue: closed and then empty means that all is done.
    pub(super) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }

    /// Calls `wait` unless there is something to pop or the inbox is closed.
    pub(super) fn sleep(&self, wait: impl FnOnce(&Signal)) {
        self.bell.sleep(|| self.is_empty() && !self.is_closed(), wait);
    }
}

/// A bounded queue whose reader is woken by a callback.
pub(super) struct Outbox<T> {
    queue: ArrayQueue<T>,
    waker: Waker,
}

impl<T> Outbox<T> {
    pub(super) fn new(capacity: usize, waker: Waker) -> Self {
        Self { queue: ArrayQueue::new(capacity), waker }
    }

    /// Hands a batch over and wakes its reader once.
    ///
    /// # Panics
    /// When the queue is full, which D4 excludes.
    pub(super) fn publish(&self, batch: &mut Vec<T>) {
        if batch.is_empty() {
            return;
        }
        let count = batch.len();
        for item in batch.drain(..) {
            let fits = self.queue.push(item).is_ok();
            assert!(
                fits,
                "a result of a batch of {count} has no place: more is outstanding than allowed"
            );
        }
        (self.waker)();
    }

    pub(super) fn pop(&self) -> Option<T> {
        self.queue.pop()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }

    /// Wakes the reader although there is nothing to read.
    pub(super) fn wake(&self) {
        (self.waker)();
    }
}

#[cfg(not(loom))]
mod primitives {
    use std::io;
    use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
    pub(crate) use std::sync::atomic::{AtomicBool, Ordering};

    pub(crate) use crossbeam::queue::ArrayQueue;
    use rustix::event::{EventfdFlags, eventfd};

    /// A sticky signal: an eventfd, so that a ring can wait for it too.
    #[derive(Debug)]
    pub(crate) struct Signal(OwnedFd);

    impl Signal {
        pub(super) fn new() -> io::Result<Self> {
            // Blocking: a ring's poll waits all the same, and a plain thread waits by reading.
            Ok(Self(eventfd(0, EventfdFlags::CLOEXEC)?))
        }

        pub(super) fn raise(&self) {
            let written =
                rustix::io::retry_on_intr(|| rustix::io::write(&self.0, &1u64.to_ne_bytes()));
            assert_eq!(
                written,
                Ok(8),
                "an eventfd takes the number 1 whenever it is below 2^64 - 2"
            );
        }

        /// Blocks until the signal is raised, and consumes it.
        pub(crate) fn wait(&self) {
            let mut count = [0; 8];
            let read = rustix::io::retry_on_intr(|| rustix::io::read(&self.0, &mut count));
            assert_eq!(read, Ok(8), "a blocking read of an eventfd answers 8 bytes");
        }
    }

    impl AsFd for Signal {
        fn as_fd(&self) -> BorrowedFd<'_> {
            self.0.as_fd()
        }
    }
}

/// The same, made of what loom can explore.
#[cfg(loom)]
mod primitives {
    use std::collections::VecDeque;

    pub(crate) use loom::sync::atomic::{AtomicBool, Ordering};
    use loom::sync::{Condvar, Mutex};

    #[derive(Debug)]
    pub(crate) struct ArrayQueue<T> {
        items: Mutex<VecDeque<T>>,
        capacity: usize,
    }

    impl<T> ArrayQueue<T> {
        pub(super) fn new(capacity: usize) -> Self {
            Self { items: Mutex::new(VecDeque::new()), capacity }
        }

        pub(super) fn push(&self, item: T) -> Result<(), T> {
            let mut items = self.items.lock().expect("no panic under the lock");
            if items.len() == self.capacity {
                return Err(item);
            }
            items.push_back(item);
            Ok(())
        }

        pub(super) fn pop(&self) -> Option<T> {
            self.items.lock().expect("no panic under the lock").pop_front()
        }

        pub(super) fn is_empty(&self) -> bool {
            self.items.lock().expect("no panic under the lock").is_empty()
        }
    }

    #[derive(Debug)]
    pub(crate) struct Signal {
        raised: Mutex<bool>,
        changed: Condvar,
    }

    impl Signal {
        pub(super) fn new() -> std::io::Result<Self> {
            Ok(Self { raised: Mutex::new(false), changed: Condvar::new() })
        }

        pub(super) fn raise(&self) {
            *self.raised.lock().expect("no panic under the lock") = true;
            self.changed.notify_one();
        }

        pub(crate) fn wait(&self) {
            let mut raised = self.raised.lock().expect("no panic under the lock");
            while !*raised {
                raised = self.changed.wait(raised).expect("no panic under the lock");
            }
            *raised = false;
        }
    }
}

pub(super) use self::primitives::Signal as WakeSignal;

#[cfg(all(test, loom))]
mod loom_tests {
    use loom::sync::atomic::AtomicUsize;
    use loom::thread;

    use super::*;

    /// Preemptions in one execution: the known lost wake-ups need two.
    const PREEMPTIONS_MAX: usize = 5;

    fn explore(run: impl Fn() + Sync + Send + 'static) {
        let mut builder = loom::model::Builder::new();
        builder.preemption_bound = Some(PREEMPTIONS_MAX);
        builder.check(run);
    }

    /// The consumer of all tests: pops until it has seen `wanted` items, asleep in between.
    fn consume(inbox: &Inbox<u32>, wanted: usize) -> Vec<u32> {
        let mut seen = Vec::new();
        while seen.len() < wanted {
            while let Some(item) = inbox.pop() {
                seen.push(item);
            }
            if seen.len() < wanted {
                inbox.sleep(Signal::wait);
            }
        }
        seen
    }

    #[test]
    fn loom_no_wake_up_is_lost_with_one_producer() {
        explore(|| {
            let inbox = Arc::new(Inbox::new(2).unwrap());
            let producer = {
                let inbox = Arc::clone(&inbox);
                thread::spawn(move || (0..2).for_each(|item| inbox.push(item).unwrap()))
            };
            assert_eq!(consume(&inbox, 2), [0, 1]);
            producer.join().unwrap();
        });
    }

    #[test]
    fn loom_no_wake_up_is_lost_with_two_producers() {
        explore(|| {
            let inbox = Arc::new(Inbox::new(2).unwrap());
            let producers = [0, 1].map(|item| {
                let inbox = Arc::clone(&inbox);
                thread::spawn(move || inbox.push(item).unwrap())
            });
            let mut seen = consume(&inbox, 2);
            seen.sort_unstable();
            assert_eq!(seen, [0, 1]);
            producers.into_iter().for_each(|producer| producer.join().unwrap());
        });
    }

    #[test]
    fn loom_closing_wakes_and_nothing_is_left_behind() {
        explore(|| {
            let inbox = Arc::new(Inbox::new(2).unwrap());
            let consumer = {
                let inbox = Arc::clone(&inbox);
                thread::spawn(move || {
                    let mut seen = 0;
                    loop {
                        let closed = inbox.is_closed();
                        while inbox.pop().is_some() {
                            seen += 1;
                        }
                        if closed {
                            return seen;
                        }
                        inbox.sleep(Signal::wait);
                    }
                })
            };
            inbox.push(7).unwrap();
            inbox.close();
            assert_eq!(consumer.join().unwrap(), 1);
        });
    }

    /// Requests in, completions out through a sticky waker: the whole way round.
    #[test]
    fn loom_a_completion_is_never_left_without_a_wake_up() {
        explore(|| {
            let notify = Arc::new(Signal::new().unwrap());
            let wakes = Arc::new(AtomicUsize::new(0));
            let waker: Waker = {
                let (notify, wakes) = (Arc::clone(&notify), Arc::clone(&wakes));
                Arc::new(move || {
                    wakes.fetch_add(1, Ordering::Relaxed);
                    notify.raise();
                })
            };
            let inbox = Arc::new(Inbox::new(2).unwrap());
            let outbox = Arc::new(Outbox::new(2, waker));
            let worker = {
                let (inbox, outbox) = (Arc::clone(&inbox), Arc::clone(&outbox));
                thread::spawn(move || {
                    for item in consume(&inbox, 2) {
                        outbox.publish(&mut vec![item]);
                    }
                })
            };
            (0..2).for_each(|item| inbox.push(item).unwrap());
            let mut seen = Vec::new();
            while seen.len() < 2 {
                while let Some(item) = outbox.pop() {
                    seen.push(item);
                }
                if seen.len() < 2 {
                    notify.wait();
                }
            }
            worker.join().unwrap();
            assert_eq!(seen, [0, 1]);
            assert_eq!(wakes.load(Ordering::Relaxed), 2);
        });
    }

    /// Proves that the tests above bite: a consumer that looks first and then says that it sleeps.
    #[test]
    #[should_panic(expected = "deadlock")]
    fn loom_finds_the_lost_wake_up_of_a_wrong_order() {
        explore(|| {
            let inbox = Arc::new(Inbox::new(1).unwrap());
            let producer = {
                let inbox = Arc::clone(&inbox);
                thread::spawn(move || inbox.push(1).unwrap())
            };
            while inbox.pop().is_none() {
                let idle = inbox.is_empty();
                inbox.bell.sleep(|| idle, Signal::wait);
            }
            producer.join().unwrap();
        });
    }
}
