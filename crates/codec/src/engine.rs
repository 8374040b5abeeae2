//! What a compression library has to do for us. Everything else (sizes, progress, errors that name
//! values) is written once, in `encode` and `decode`.

/// Encodes one stream.
pub(crate) trait Compress: Send {
    /// Name of the library.
    fn name(&self) -> &'static str;

    /// Appends `pages`, encoded and flushed, to `out`, within its capacity.
    fn flush(&mut self, pages: &[u8], out: &mut Vec<u8>) -> Result<(), Fault>;
}

/// Why [`Compress::flush`] failed. The stream is lost either way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    /// The capacity of the output did not suffice.
    Room,
    /// The library refused, with its words.
    Refused(&'static str),
}

/// Decodes one stream.
pub(crate) trait Decompress: Send {
    /// Decodes some of `input` into some of `output`, at least one byte of one of them if that is
    /// possible at all. An error is the library's description of what is wrong with the input.
    fn step(&mut self, input: &[u8], output: &mut [u8]) -> Result<Step, &'static str>;
}

/// What one [`Decompress::step`] has done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Step {
    /// Bytes taken from the start of the input.
    pub(crate) consumed: usize,
    /// Bytes written to the start of the output.
    pub(crate) produced: usize,
    /// Whether the stream ended here.
    pub(crate) ended: bool,
}
