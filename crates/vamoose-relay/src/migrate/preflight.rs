//! What is checked at both ends before an attempt begins. The checks change nothing, and the journal does not mention them.

use std::time::Duration;

use handover::{AttemptId, DestinationMessage, Prepare, SourceMessage, from_details, to_details};
use multifd::Method;
use tracing::{info, warn};
use vamoose_link::{Conversation, MethodChoice, Opening, random_id};

use super::{Cause, Failure, Migration, SourceQemu, at_source, link::SpeedTest};
use crate::{
    Fact, Fit, Forecast, Journal,
    control::{ControlError, Offer, PostCopyAbilities, Request, answer, connect_first},
    journal::{AtSource, Record},
    qemu::{Image, compare, compare_disks},
};

/// The server has inspected its QEMU, and waits for `prepare`.
pub(super) struct Inspected {
    pub(super) control: Conversation,
    /// The streams for main stream and channels, which are being opened.
    pub(super) streams: Vec<Opening>,
    pub(super) prepare: Prepare,
    /// The disks to be copied.
    pub(super) images: Vec<Image>,
    /// The server discards what measures the link.
    pub(super) measures: bool,
    /// The link is too fast for the encoders to fill it.
    pub(super) has_fast_link: bool,
    facts: Vec<Fact>,
}

/// How long a server may take to inspect its QEMU.
const INSPECTED_WITHIN: Duration = Duration::from_secs(15);

impl Migration<'_> {
    /// Checks all that [`Migration::run`] checks before it begins, predicts what it would take, and changes nothing. `report` is
    /// called with what was compared.
    ///
    /// # Errors
    /// Why the guest would not be migrated.
    pub fn check(&self, report: &mut dyn FnMut(&Fact)) -> Result<Forecast, Failure> {
        let journal = Journal::open(self.state_dir).map_err(at_source)?;
        self.check_idle(&journal)?;
        let source = SourceQemu::connect(self.qmp, self.connect_timeout);
        let mut source = source.map_err(at_source)?;
        let of_this = |record: &Record<AtSource>| record.qemu.is_same(&source.instance);
        self.find_unfinished(&journal, of_this, Cause::Unfinished)?;
        source.look().map_err(at_source)?;
        self.check_source(&mut source).map_err(at_source)?;
        let there = self.check_there(&mut source, report);
        there.map_err(|cause| source.with_guest_kept(at_source(cause)))
    }

    /// Refuses a source that cannot migrate its guest in this way.
    pub(super) fn check_source(&self, source: &mut SourceQemu) -> Result<(), Cause> {
        let post_copy = self.post_copy.map(|_| PostCopyAbilities { preempt: false });
        source.check(self.zero_page_detection, &self.capabilities(post_copy))?;
        source.post_copy = post_copy.map(|_| source.qemu.post_copy_abilities());
        if source.post_copy.is_some() && source.qemu.misses_writes()? {
            warn!(
                "a source of QEMU 11 without KVM misses writes of its guest when post-copy is on: the guest may fail at the destination. \
                 Use KVM, or do without post-copy"
            );
        }
        Ok(())
    }

    fn check_there(
        &self,
        source: &mut SourceQemu,
        report: &mut dyn FnMut(&Fact),
    ) -> Result<Forecast, Cause> {
        let attempt = AttemptId(random_id()?);
        let control = self.connect(attempt, 0)?;
        let inspected = self.inspect(control, source, 0, None)?;
        inspected.facts.iter().for_each(report);
        self.judge(&inspected)?;
        Ok(self.forecast(attempt, source, &inspected)?)
    }

    /// Refuses a guest that another process is moving.
    pub(super) fn check_idle(&self, journal: &Journal) -> Result<(), Failure> {
        let is_driven = |record: &Record<AtSource>| {
            record.qemu.is_at(self.qmp) && journal.is_driven::<AtSource>(record.attempt)
        };
        self.find_unfinished(journal, is_driven, Cause::UnderWay)
    }

    /// Fails if there is such an unfinished attempt.
    fn find_unfinished(
        &self,
        journal: &Journal,
        is_wanted: impl Fn(&Record<AtSource>) -> bool,
        cause: fn(AttemptId, String) -> Cause,
    ) -> Result<(), Failure> {
        let records = journal.records::<AtSource>().map_err(at_source)?;
        let mut records = records.into_iter();
        match records.find(|record| !record.is_over() && is_wanted(record)) {
            None => Ok(()),
            Some(record) => {
                let cause = cause(record.attempt, record.side.to.clone());
                Err(Failure::of(record.attempt, cause, record.state.guest()))
            }
        }
    }

    /// Warns of what may fail.
    pub(super) fn warn(&self, inspected: &Inspected) {
        let facts = inspected.facts.iter();
        for fact in facts.filter(|fact| fact.fit == Fit::MayFail) {
            warn!("{}: the machines differ: {fact}", self.name);
        }
    }

    /// Refuses a waiting QEMU that would certainly fail.
    pub(super) fn judge(&self, inspected: &Inspected) -> Result<(), Cause> {
        let facts = inspected.facts.iter();
        let fails = facts.filter(|fact| fact.fit == Fit::Fails);
        let differences: Vec<_> = fails.map(Fact::to_string).collect();
        match differences.is_empty() {
            true => Ok(()),
            false => Err(Cause::Differs {
                host: self.host.to_owned(),
                differences,
            }),
        }
    }

    /// The control connection, for a session that is to have this many streams.
    pub(super) fn connect(
        &self,
        attempt: AttemptId,
        streams: usize,
    ) -> Result<Conversation, Cause> {
        let limit = self.connect_timeout;
        let control = connect_first(self.to, attempt, streams, limit, self.cancel)?;
        control.ok_or(Cause::Cancelled)
    }

    /// Whether the method depends on the link, which is one path without a bandwidth limit. The copies of disks may take hours, so a test
    /// before them would not tell.
    pub(super) fn needs_speed_test(&self, source: &SourceQemu) -> bool {
        matches!(self.config.method, MethodChoice::Adaptive(_))
            && self.config.max_bandwidth.is_none()
            && self.config.limit.rate().is_none()
            && self.to.paths.len() == 1
            && self.storage.is_none()
            && source.post_copy.is_none()
    }

    /// Compares both QEMUs, while `streams` streams are being opened, and the link's speed is tested, if it is to be.
    pub(super) fn inspect(
        &self,
        mut control: Conversation,
        source: &mut SourceQemu,
        streams: usize,
        speed_test: Option<AttemptId>,
    ) -> Result<Inspected, Cause> {
        let images = match self.storage {
            Some(storage) => storage.choose(source.qemu.images()?)?,
            None => Vec::new(),
        };
        let disks: Vec<_> = images.iter().map(|image| image.disk.clone()).collect();
        let names = disks.iter().map(|disk| disk.name.clone()).collect();
        let mut request = Request {
            post_copy: source.post_copy,
            ..self.request(self.name, names)
        };
        let prepare = |request: &Request| to_details(request).map(Prepare::new);
        let inspect = prepare(&request).map_err(ControlError::from)?;
        let sent = control.send(&SourceMessage::Inspect(inspect));
        let session = control.stream().session();
        let speed_test = session.as_ref().zip(speed_test);
        let speed_test = speed_test
            .map(|(session, attempt)| SpeedTest::begin(session, attempt, self.encoders()));
        let streams = session.map_or_else(Vec::new, |session| session.open_ahead(streams));
        let here = source.qemu.machine(&source.instance.uuid)?;
        let answered = sent.and_then(|()| answer(&mut control, INSPECTED_WITHIN));
        let offer: Offer = match answered.map_err(ControlError::from)? {
            DestinationMessage::Inspected { details } => {
                from_details(details).map_err(ControlError::from)?
            }
            DestinationMessage::Refused { reason } => return Err(Cause::Refused(reason)),
            other => return Err(Cause::unexpected(&other)),
        };
        if source.post_copy.is_some() && offer.post_copy.is_none() {
            return Err(Cause::Refused(
                "it is of an older release, which does not know post-copy".to_owned(),
            ));
        }
        source.post_copy = offer.post_copy;
        source.zero_pages = self.zero_pages(source, &offer)?;
        source.check_suspended(&offer)?;
        let mut facts = compare(&here, &offer.machine, self.host, self.name);
        if !disks.is_empty() {
            let there = offer.disks.ok_or_else(|| {
                let older = "it is of an older release, which cannot take copies of disks";
                Cause::Refused(older.to_owned())
            })?;
            let increments = self.storage.is_some_and(|storage| storage.increments);
            facts.extend(compare_disks(&disks, &there, self.host, increments));
        }
        let has_fast_link = speed_test.is_some_and(|test| test.is_fast());
        if has_fast_link {
            info!("{}: the link is fast: most pages go raw", self.name);
            request.method = Method::None.name().to_owned();
        }
        Ok(Inspected {
            control,
            streams,
            prepare: prepare(&request).map_err(ControlError::from)?,
            has_fast_link,
            images,
            measures: offer.measures,
            facts,
        })
    }

    /// What is sent with `inspect` and `prepare`.
    pub(super) fn request(&self, name: &str, disks: Vec<String>) -> Request {
        Request {
            name: name.to_owned(),
            channels: self.channels,
            page_size: u32::try_from(self.config.layout.page_size()).unwrap_or(u32::MAX),
            method: self.config.method.name().to_owned(),
            disks,
            post_copy: None,
            resumes: false,
        }
    }

    /// How the source is to find zero pages, where it can be set.
    fn zero_pages(&self, source: &SourceQemu, offer: &Offer) -> Result<Option<String>, Cause> {
        let (ours, theirs) = (source.qemu.version, &offer.qemu);
        info!("source QEMU {ours}, destination QEMU {theirs}");
        if !source.qemu.knows_zero_pages() {
            return Ok(None);
        }
        // An older destination would lose zero pages in packets silently.
        let best = match offer.knows_zero_pages {
            true => "multifd",
            false => "legacy",
        };
        let wanted = self.zero_page_detection.unwrap_or(best);
        if wanted == "multifd" && !offer.knows_zero_pages {
            return Err(Cause::Refused(format!(
                "its QEMU {theirs} does not know zero-page-detection multifd"
            )));
        }
        Ok(Some(wanted.to_owned()))
    }
}
