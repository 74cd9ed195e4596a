//! Opening captures: plain or zstd, told apart by their first bytes.

use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;

use anyhow::{Context, Result};

const ZSTD_MAGIC: [u8; 4] = [0x28, 0xb5, 0x2f, 0xfd];

/// Opens a file.
///
/// # Errors
/// When it can't be read.
pub fn open(path: &Path) -> Result<Box<dyn BufRead>> {
    let file = File::open(path).with_context(|| path.display().to_string())?;
    from_reader(file).with_context(|| path.display().to_string())
}

/// Reads bytes that are plain or zstd.
///
/// # Errors
/// When they can't be read.
pub fn from_reader(source: impl Read + 'static) -> Result<Box<dyn BufRead>> {
    let mut plain = BufReader::with_capacity(1 << 16, source);
    if plain.fill_buf()?.starts_with(&ZSTD_MAGIC) {
        let decoder = zstd::Decoder::with_buffer(plain)?;
        return Ok(Box::new(BufReader::new(decoder)));
    }
    Ok(Box::new(plain))
}
