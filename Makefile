# Each target sets up what it needs first (quick when that is done): a Debian 12 with make, git, curl and ca-certificates is
# enough. scripts/setup installs compilers and Rust, as root or with sudo; all else stays in target/.

# Rust may have been installed by scripts/setup a moment ago.
export PATH := $(PATH):$(HOME)/.cargo/bin

.PHONY: help setup build demo test postcopy model simulate flips load databases faults soak bench paths predict siblings libvirt package \
	package-rpm package-image package-compare package-test first-migration release book

help:          # Show these targets
	@sed -n 's/^\([a-z-]*\): .*# \(.*\)/\1@\2/p' $(MAKEFILE_LIST) | while IFS=@ read -r target text; do \
		printf '  make %-15s  %s\n' "$$target" "$$text"; \
	done

setup:         # Fetch compilers, Rust, QEMUs, a test guest and libqatzip
	scripts/setup

build: setup   # Build target/release/vamoose and examples/vamoose-demo
	cargo build --release -p vamoose --bin vamoose $(if $(filter x86_64,$(shell uname -m)),-p vamoose-live --example vamoose-demo)

# One command for both programs: they share the dependencies, and one finds the other beside itself.
demo: setup    # Move a running guest between two QEMUs, pull the cable meanwhile, prove it, compare with stock QEMU (a few minutes)
	cargo build --release -p vamoose -p vamoose-bench
	"$${CARGO_TARGET_DIR:-target}/release/vamoose" bench demo

# What a machine cannot test is printed as SKIPPED; with VAMOOSE_NO_SKIP=1 it is an error. Tests wait more than they compute
# (for QEMUs, for timeouts): three for each processor keep it busy.
test: setup    # Run all tests
	RUST_TEST_THREADS=$${RUST_TEST_THREADS:-$$(($$(nproc) * 2))} cargo test --workspace --no-fail-fast
	cargo test -p vamoose-live --examples   # which the line above only builds

# POSTCOPY_RUNS sets how often each.
postcopy: setup # Cut links and kill processes after the switch to post-copy, and measure how long a guest waits for a page (an hour)
	cargo test --release -p vamoose --test all post_copy:: -- --ignored --nocapture --test-threads 1

# What a test run explores in a minute, with more of everything: MODEL_FAULTS, MODEL_COMMANDS, MODEL_ATTEMPTS, MODEL_HOSTS,
# MODEL_TRACES and MODEL_SEED set how much.
model: setup   # Explore the model of the hand-over further (some minutes)
	cargo test -p handover --test model -- --ignored

# SECONDS sets how long, SEED the first seed; SEED alone runs one seed and prints its trace. The test `every_mutant_is_found` beside it
# puts defects back.
simulate: setup # Simulate hosts, faults and people for five minutes (SECONDS, SEED)
	cargo test --release -p lab --test simulate -- many_seeds --ignored --nocapture

# FLIPS and FLIPS_SEED set how many and which.
flips: setup   # Flip 10,000 bits on the link between two Vamooses (some minutes)
	cargo test -p vamoose-link --test all flips -- --include-ignored --nocapture

# LOAD_MIGRATIONS and LOAD_STRANGERS set how many: 64 and 10000. As root, for strangers of another user.
load: setup    # Many migrations at once through two gateways, among as many strangers as can come (3 GiB of memory)
	cargo test --release -p vamoose --test all gateway::load -- --ignored --nocapture
	cargo test --release -p vamoose --test all limit:: -- --ignored --nocapture

# DATABASE_GUESTS and DATABASE_SEED set how many and which.
databases: setup # Move guests with PostgreSQL on a disk, three times each, with faults in between (a quarter of an hour)
	scripts/setup workloads
	cargo test --release -p vamoose --test all database:: -- --ignored --nocapture

# FAULTS, FAULTS_MINUTES and FAULTS_SEED set how many, how long and which, FAULTS_JOBS how many at once; FAULTS_ONLY selects faults by a
# part of their names, and FAULTS_EXPERIMENT one experiment of a seed.
faults: setup  # Break migrations in every way, at random moments, until one goes wrong (FAULTS=2000 FAULTS_SEED=1)
	cargo test --release -p vamoose --test all campaign:: -- --ignored --nocapture

# SOAK_SEED sets which faults. Ends at the first broken promise, with all that is known of it. As root.
soak: setup    # Migrations of all kinds with faults for hours, with memory and descriptors in target/soak (make soak HOURS=8)
	SOAK_HOURS=$(or $(HOURS),8) cargo test --release -p vamoose --test all soak:: -- --ignored --nocapture

bench: setup   # Measure Vamoose beside stock QEMU on this host (minutes; BENCH="silesia links --out DIR"; make bench BENCH=list)
	cargo build --release -p vamoose -p vamoose-bench
	"$${CARGO_TARGET_DIR:-target}/release/vamoose" bench $(or $(BENCH),--quick)

# As root. PATHS_RAM and PATHS_RUNS set the guest's memory in MiB and how often each case runs.
paths: setup   # Measure what a second path gains
	cargo test --release -p vamoose --test all paths:: -- --ignored --nocapture

# As root. PREDICT_ONLY selects rows by a part of their names.
predict: setup # Compare what `vamoose predict` says of guests and links with their migrations (minutes)
	cargo test --release -p vamoose --test all predict:: -- --ignored --nocapture

# As root. SIBLINGS_ONLY selects guests by a part of their names, SIBLINGS_GUESTS, SIBLINGS_RUNS and SIBLINGS_RATE set how many, how
# often each case runs, and the link's rate in Mbit/s.
siblings: setup # Measure guests that are alike with and without a page store, beside QEMU alone (an hour, 20 GB of disk)
	scripts/setup workloads
	cargo test --release -p vamoose --test all gateway::siblings -- --ignored --nocapture

# As root. STORAGE_SIZE and STORAGE_RUNS set the disk's size in MiB and how often each case runs, STORAGE_ONLY selects some.
storage: setup # Measure disks and requests through two gateways beside QEMU alone, and cut the link meanwhile (minutes)
	cargo test --release -p vamoose --test all gateway::storage -- --ignored --nocapture --test-threads 1

# As root. LIBVIRT_CASES, LIBVIRT_WAYS and LIBVIRT_VERSIONS choose cases, LIBVIRT_ROUNDS and LIBVIRT_GUESTS set how many.
libvirt: setup   # Move guests between two hosts with virsh, in every way (half an hour; LIBVIRT=cases, times, disks or evacuation)
	scripts/setup libvirt
	cargo test --release -p vamoose --test all libvirt::matrix::$(or $(LIBVIRT),cases) -- --ignored --nocapture

book:          # Build the handbook, docs/, into target/book, with search
	scripts/setup build
	scripts/book

# The steps can be run one by one: scripts/release sbom checksums.
release: setup # Build what a release has into target/release-VERSION: packages, sources, SBOM, notes, checksums
	scripts/release

package: setup # Build target/package/vamoose_VERSION_amd64.deb and vamoose-bench_VERSION_amd64.deb
	scripts/package

# Needs Debian's package rpm.
package-rpm: package # Build the RPM of the same files, and check it
	scripts/package rpm

# Root; needs Debian's packages buildah and debootstrap.
package-image: package # Build the container image on a fresh Debian, and run it
	scripts/package-image

package-compare: setup # Build the package in two folders, and compare byte by byte
	scripts/package compare

# Root; needs Debian's packages debootstrap and systemd-container.
package-test: package # Install, upgrade and remove the package in a fresh Debian that systemd boots
	scripts/package-test

# Root; needs Debian's packages debootstrap, systemd-container, openssh-client, cpio and tcpdump.
first-migration: package # From two fresh Debians to a migration by virsh: type docs/install.md's commands, count, and time them
	scripts/first-migration
