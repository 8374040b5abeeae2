//! `vamoose keys`: the key that identifies this host to its peers.

use std::path::PathBuf;

use anyhow::Result;
use clap::{Args, Subcommand};
use vamoose_link::Keys;

use vamoose::{say, security::keys_directory};

/// Make or show the key of this host, for TLS without certificates
///
/// Each host has a key and trusts the public keys of its peers, which `show` prints there. A trusted key is a line of the file
/// `trusted`, optionally followed by hosts=NAME,NAME... and a comment, or is given with --peer-key, which replaces the file.
#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  vamoose keys init
  vamoose keys show")]
pub(crate) struct Options {
    #[command(subcommand)]
    action: Action,
}

#[derive(Subcommand, Debug)]
enum Action {
    /// Make a key, and print its public half
    Init(Directory),
    /// Print the public half of the key, and on standard error the keys that are trusted
    Show(Directory),
}

#[derive(Args, Debug)]
struct Directory {
    /// Directory of the keys
    /// [default: /etc/vamoose for root, ~/.config/vamoose for other users]
    // The alias is an earlier name.
    #[arg(long, value_name = "DIR", alias = "dir")]
    keys: Option<PathBuf>,
}

pub(crate) fn run(options: &Options) -> Result<()> {
    match &options.action {
        Action::Init(directory) => {
            let directory = keys_directory(directory.keys.clone())?;
            println!("{}", Keys::generate(&directory)?);
            // Standard output has only the key: it may be redirected to the other host's `trusted`.
            eprintln!(
                "This is the public key of this host. Add it to the file `trusted` on the other host, and the other host's \
                 to {}; then run `vamoose serve` there, and `vamoose migrate GUEST HOST` here.",
                Keys::trusted_file(&directory).display()
            );
        }
        Action::Show(directory) => {
            let directory = keys_directory(directory.keys.clone())?;
            println!("{}", Keys::public_key(&directory)?);
            let file = Keys::trusted_file(&directory);
            if file.exists() {
                say(format_args!("{} trusts:", file.display()));
                for line in Keys::trusted_lines(&directory)? {
                    say(format_args!("  {line}"));
                }
            }
        }
    }
    Ok(())
}
