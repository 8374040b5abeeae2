//! Two machines hand over a guest in memory: the messages are queues, the guests are flags.
//!
//! ```sh
//! cargo run -p handover --example in_memory           # the guest moves
//! cargo run -p handover --example in_memory -- lost   # `running` is lost: the source dials again and asks
//! cargo run -p handover --example in_memory -- broken # the destination cannot run the guest: it stays at the source
//! ```

use std::{collections::VecDeque, env};

use handover::{
    Destination, DestinationDriver, DestinationEvent, DestinationHost, DestinationMessage,
    Incarnation, Source, SourceDriver, SourceEvent, SourceHost, SourceMessage,
};

/// What goes wrong.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Fault {
    None,
    LostAnswer,
    BrokenGuest,
}

fn main() {
    let fault = match env::args().nth(1).as_deref() {
        Some("lost") => Fault::LostAnswer,
        Some("broken") => Fault::BrokenGuest,
        _ => Fault::None,
    };
    let mut destination = There {
        driver: DestinationDriver::new(Destination::new(Incarnation([7; 16]))),
        guest: Guest {
            fault,
            runs: false,
            answers: VecDeque::new(),
        },
    };
    // The engine has moved memory and device state: both machines are told.
    destination.tell(DestinationEvent::Loaded);
    let mut source = SourceDriver::new(Source::new(true));
    source.handle(SourceEvent::Message(DestinationMessage::Prepared {
        protocol: handover::VERSION,
        incarnation: Incarnation([7; 16]),
        details: handover::Details::new(),
    }));
    source.handle(SourceEvent::Stopped);

    let mut here = Here {
        destination,
        runs: false,
    };
    let decision = source.drive(&mut here, |here, _| {
        match here.destination.guest.answers.pop_front() {
            Some(answer) => {
                println!("  <- {answer:?}");
                SourceEvent::Message(answer)
            }
            None => SourceEvent::Closed { complete: false },
        }
    });
    println!("the guest is at: {:?}", decision.guest);
    assert!(
        here.runs != here.destination.guest.runs,
        "exactly one side runs the guest"
    );
}

/// The source's side. There is no journal: the process is its guest.
struct Here {
    destination: There,
    runs: bool,
}

impl SourceHost for Here {
    fn send(&mut self, message: &SourceMessage) -> Option<SourceEvent> {
        println!("  -> {message:?}");
        self.destination
            .tell(DestinationEvent::Message(message.clone()));
        None
    }

    fn dial(&mut self, _: &Source) -> Option<SourceEvent> {
        println!("  -- connected again");
        self.destination.guest.answers.clear();
        Some(SourceEvent::Connected)
    }

    fn resume(&mut self, _: &Source) -> Option<SourceEvent> {
        self.runs = true;
        Some(SourceEvent::Resumed)
    }
}

/// The destination's side.
struct There {
    driver: DestinationDriver,
    guest: Guest,
}

struct Guest {
    fault: Fault,
    runs: bool,
    /// Messages for the source.
    answers: VecDeque<DestinationMessage>,
}

impl There {
    fn tell(&mut self, event: DestinationEvent) {
        self.driver.handle(event);
        self.driver.drive(&mut self.guest);
    }
}

impl DestinationHost for Guest {
    fn send(&mut self, message: &DestinationMessage) {
        let is_running = matches!(message, DestinationMessage::Running { .. });
        if is_running && self.fault == Fault::LostAnswer {
            println!("  <- {message:?} is lost");
            self.fault = Fault::None;
            return;
        }
        self.answers.push_back(message.clone());
    }

    fn run(&mut self, resume: bool) -> Option<DestinationEvent> {
        if self.fault == Fault::BrokenGuest {
            let cause = "no memory for the guest".to_owned();
            return Some(DestinationEvent::NotStarted { cause });
        }
        self.runs = resume;
        self.check(false)
    }

    fn check(&mut self, _: bool) -> Option<DestinationEvent> {
        let state = if self.runs { "running" } else { "paused" };
        Some(DestinationEvent::Started {
            state: state.to_owned(),
        })
    }

    fn end(&mut self) -> Option<DestinationEvent> {
        let cause = String::new();
        Some(DestinationEvent::Died { cause })
    }

    fn forget(&mut self) {}
}
