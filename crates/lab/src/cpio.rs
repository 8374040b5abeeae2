//! Writes cpio archives in the "newc" format: what Linux takes as an initramfs.

use std::io::{Error, Read, Result, Write};

/// An archive being written to `W`. Directories must be added before what is in them.
pub struct Archive<W> {
    out: W,
    written: u64,
    entries: u32,
}

impl<W: Write> Archive<W> {
    /// An empty archive.
    pub fn new(out: W) -> Self {
        Self {
            out,
            written: 0,
            entries: 0,
        }
    }

    /// Adds a directory with the mode 0755.
    pub fn directory(&mut self, name: &str) -> Result<()> {
        self.header(name, 0o040_755, 0, (0, 0))
    }

    /// Adds a regular file with these permissions and exactly `size` bytes from `content`.
    pub fn file(
        &mut self,
        name: &str,
        permissions: u32,
        size: u64,
        content: impl Read,
    ) -> Result<()> {
        let length = u32::try_from(size)
            .map_err(|_| Error::other(format!("{name}: {size} bytes do not fit a cpio")))?;
        self.header(name, 0o100_000 | permissions, length, (0, 0))?;
        let copied = std::io::copy(&mut content.take(size), &mut self.out)?;
        if copied != size {
            return Err(Error::other(format!(
                "{name}: {copied} bytes instead of {size}"
            )));
        }
        self.written += copied;
        self.pad()
    }

    /// Adds a character device with the mode 0600.
    pub fn character_device(&mut self, name: &str, major: u32, minor: u32) -> Result<()> {
        self.header(name, 0o020_600, 0, (major, minor))
    }

    /// Ends the archive and gives the output back.
    pub fn finish(mut self) -> Result<W> {
        self.header("TRAILER!!!", 0, 0, (0, 0))?;
        self.out.flush()?;
        Ok(self.out)
    }

    fn header(&mut self, name: &str, mode: u32, size: u32, device: (u32, u32)) -> Result<()> {
        self.entries += 1;
        let name_size = u32::try_from(name.len() + 1).map_err(|_| Error::other("name too long"))?;
        // inode, mode, uid, gid, links, mtime, size, device (2), device of a node (2), size of the name, checksum (unused)
        let fields = [
            self.entries,
            mode,
            0,
            0,
            1,
            0,
            size,
            0,
            0,
            device.0,
            device.1,
            name_size,
            0,
        ];
        let mut header = String::from("070701");
        for field in fields {
            header.push_str(&format!("{field:08x}"));
        }
        header.push_str(name);
        header.push('\0');
        self.out.write_all(header.as_bytes())?;
        self.written += header.len() as u64;
        self.pad()
    }

    fn pad(&mut self) -> Result<()> {
        while !self.written.is_multiple_of(4) {
            self.out.write_all(&[0])?;
            self.written += 1;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_are_aligned_and_sized() {
        let mut archive = Archive::new(Vec::new());
        archive.directory("dev").unwrap();
        archive.character_device("dev/ttyS0", 4, 64).unwrap();
        archive
            .file("init", 0o755, 5, &b"hello, ignored"[..])
            .unwrap();
        let bytes = archive.finish().unwrap();

        let mut at = 0;
        let mut names = Vec::new();
        while at < bytes.len() {
            let header = std::str::from_utf8(&bytes[at..at + 110]).unwrap();
            let field =
                |n: usize| usize::from_str_radix(&header[6 + 8 * n..14 + 8 * n], 16).unwrap();
            assert!(header.starts_with("070701"));
            let (size, name_size) = (field(6), field(11));
            let name = std::str::from_utf8(&bytes[at + 110..at + 110 + name_size - 1]).unwrap();
            let data = (at + 110 + name_size).next_multiple_of(4);
            if name == "init" {
                assert_eq!(&bytes[data..data + size], b"hello");
                assert_eq!(field(1), 0o100_755);
            }
            if name == "dev/ttyS0" {
                assert_eq!((field(1), field(9), field(10)), (0o020_600, 4, 64));
            }
            names.push(name.to_owned());
            at = (data + size).next_multiple_of(4);
        }
        assert_eq!(names, ["dev", "dev/ttyS0", "init", "TRAILER!!!"]);
    }

    #[test]
    fn a_short_file_is_an_error() {
        let mut archive = Archive::new(Vec::new());
        assert!(archive.file("short", 0o644, 5, &b"1234"[..]).is_err());
    }
}
