//! `vamoose bench`: moves guests by Vamoose and by stock QEMU on this host, and makes tables and plots of it.

#![forbid(unsafe_code)]

mod record;
mod scenario;

fn main() {}
