//! The simulator's register, behind the same call as the real ones.
//!
//! ```text
//! apply --ask--> sim::register::Register --events in virtual time--> whoever waits takes the next
//! ```

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;

use common::register::{RegisterAnswer, RegisterOp, RegisterOutcome, RegisterRequest};
use common::{Incarnation, NodeId, Peer, Prng};
use sim::clock::Moment;
use sim::register::{Consultation, Register, RegisterProfile};
use tests::run;

use super::{Kept, cas, decide, has_one_winner, keeps_values, survives_an_outage};

/// A handle; clones share the register.
#[derive(Clone)]
struct Simulated {
    world: Rc<RefCell<SimulatedWorld>>,
    id: u64,
}

struct SimulatedWorld {
    register: Register,
    now: Moment,
    queue: Vec<(Moment, Consultation)>,
    asked: u64,
    answers: Vec<RegisterAnswer>,
}

const ASKER: Peer = Peer { node: NodeId(1), incarnation: Incarnation(1) };

impl Simulated {
    fn new(profile: RegisterProfile, seed: u64) -> Self {
        let register = Register::new(profile, Prng::new(seed));
        let world = SimulatedWorld {
            register,
            now: Moment::ZERO,
            queue: Vec::new(),
            asked: 0,
            answers: Vec::new(),
        };
        Self { world: Rc::new(RefCell::new(world)), id: 0 }
    }
}

impl SimulatedWorld {
    fn turn(&mut self) {
        let places = 0..self.queue.len();
        let Some(place) = places.min_by_key(|place| self.queue[*place].0) else { return };
        let (at, event) = self.queue.remove(place);
        self.now = self.now.max(at);
        match event {
            Consultation::Answer { answer, .. } => self.answers.push(answer),
            Consultation::Reach { from, request, answered } => {
                self.register.reach(self.now, from, request, answered, &mut self.queue);
            }
        }
    }

    fn take_answer(&mut self, id: u64) -> Option<RegisterOutcome> {
        let place = self.answers.iter().position(|answer| answer.id == id)?;
        Some(self.answers.remove(place).outcome)
    }
}

impl Kept for Simulated {
    async fn apply(&mut self, op: RegisterOp) -> RegisterOutcome {
        {
            let mut world = self.world.borrow_mut();
            let SimulatedWorld { register, now, queue, asked, .. } = &mut *world;
            *asked += 1;
            self.id = *asked;
            register.ask(*now, ASKER, RegisterRequest { id: self.id, op }, queue);
        }
        loop {
            // Whoever asks at the same time has asked before the first event.
            tokio::task::yield_now().await;
            let mut world = self.world.borrow_mut();
            world.turn();
            if let Some(outcome) = world.take_answer(self.id) {
                return outcome;
            }
        }
    }
}

#[test]
fn the_simulated_register_keeps_the_contract() {
    run(async {
        let named = RefCell::new(BTreeMap::<String, Simulated>::new());
        keeps_values(&|cluster| {
            let fresh = || Simulated::new(RegisterProfile::default(), 1);
            named.borrow_mut().entry(cluster.to_owned()).or_insert_with(fresh).clone()
        })
        .await;
        let register = Simulated::new(RegisterProfile::default(), 2);
        has_one_winner(&mut std::array::from_fn(|_| register.clone())).await;
        let mut register = Simulated::new(RegisterProfile::default(), 3);
        let world = Rc::clone(&register.world);
        survives_an_outage(&mut register, 3, &mut |running| {
            let mut world = world.borrow_mut();
            let now = world.now;
            match running {
                true => world.register.calm(now),
                false => world.register.outage(Moment(u64::MAX)),
            }
        })
        .await;
        let (mut came, mut lost) = (0, 0);
        for seed in 0..100 {
            let profile = RegisterProfile {
                lost_ppm: 300_000,
                unavailable_ppm: 100_000,
                ..RegisterProfile::default()
            };
            let mut register = Simulated::new(profile, seed);
            if let RegisterOutcome::Indeterminate(_) = cas(&mut register, 0, b"mine").await {
                match decide(&mut register, 0, b"mine").await {
                    true => came += 1,
                    false => lost += 1,
                }
            }
        }
        assert!(came > 5 && lost > 5, "{came} came, {lost} did not");
    });
}
