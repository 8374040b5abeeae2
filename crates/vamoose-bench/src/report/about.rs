//! What the report says of itself, in both formats.

pub(super) const TITLE: &str = "Vamoose beside stock QEMU";

/// How to read the tables.
pub(super) const HOW: &str = "Figures are medians of the rounds, with the least and the most in brackets; the cells of a scenario take turns, so \
    that a slow moment of the machine meets all of them. Only figures of one run can be compared. A migration whose memory was not \
    equal afterwards ends the run and gives no figure. Vamoose's default (`migrate auto`, or `pair auto` where that was not measured, \
    without options) is in bold.";

pub(super) const CELLS: &str = "Medians of the rounds (least–most), Vamoose's default in bold";

pub(super) const OTHERS: &str = "The other columns";

/// Above all that is compared, in one table.
pub(super) const OVERVIEW: &str = "Vamoose's default beside stock QEMU's fastest method. The ratio is of the seconds; downtime \
    and CPU seconds are of the first and of the second";

pub(super) const VERDICTS: &str = "Vamoose's default beside stock QEMU's fastest method, beside its method of the least CPU \
    where that is another, and beside Vamoose's own fastest fixed method";

/// Above the figures of others.
pub(super) const PUBLISHED: &str = "Published: their authors' figures, on their hardware";

pub(super) const COLUMNS: &str = "What the columns mean";
