//! A disk to boot from, with 155 bytes of 16-bit code. It counts 200 times a second, writes each number to the serial port and into
//! one of 128 pages of its memory after another, and complains of a page that does not have what it wrote there 128 numbers ago.

use std::{fs, path::Path};

use anyhow::{Context as _, Result, bail, ensure};

/// How many pages it writes to.
const PAGES: u64 = 128;

/// Writes the disk.
pub(super) fn write_disk(path: &Path) -> Result<()> {
    let mut disk = vec![0; 1 << 20];
    disk[..CODE.len()].copy_from_slice(&CODE);
    disk[510..512].copy_from_slice(&[0x55, 0xaa]);
    fs::write(path, disk).context("writing a disk")
}

/// What a guest has written to its serial port on one host: the first number and the last.
pub(super) fn numbers(console: &Path) -> Result<Option<(u64, u64)>> {
    let bytes = fs::read(console).with_context(|| format!("reading {}", console.display()))?;
    // What the firmware says comes before, without an end of a line.
    let text = String::from_utf8_lossy(&bytes);
    if let Some(at) = text.find('!') {
        bail!("the guest's memory has changed before: {}", &text[at..]);
    }
    // The last line may be under way.
    let whole = text.rsplit_once('\n').map_or("", |(whole, _)| whole);
    let parse = |line: &str| {
        let digits = line.get(line.len().checked_sub(8)?..)?;
        u64::from_str_radix(digits, 16).ok()
    };
    let numbers: Vec<u64> = whole.lines().filter_map(parse).collect();
    for pair in numbers.windows(2) {
        ensure!(
            pair[0] + 1 == pair[1],
            "{:#x} follows {:#x}",
            pair[1],
            pair[0]
        );
    }
    Ok(numbers.first().copied().zip(numbers.last().copied()))
}

/// Whether it has been on this host for long enough to see all its pages again.
pub(super) fn has_seen_all(console: &Path) -> Result<bool> {
    let numbers = numbers(console)?;
    Ok(numbers.is_some_and(|(first, last)| last - first > 2 * PAGES))
}

#[rustfmt::skip]
const CODE: [u8; 155] = [
    0xfa,                               //        cli
    0x31, 0xc0,                         //        xor  ax, ax
    0x8e, 0xd8,                         //        mov  ds, ax
    0x8e, 0xd0,                         //        mov  ss, ax
    0xbc, 0x00, 0x70,                   //        mov  sp, 0x7000
    0x66, 0x31, 0xdb,                   //        xor  ebx, ebx
    0xc7, 0x06, 0x20, 0x00, 0x94, 0x7c, //        mov  word [8 * 4], tick
    0xa3, 0x22, 0x00,                   //        mov  [8 * 4 + 2], ax
    0xb0, 0xfe, 0xe6, 0x21,             //        out  0x21, 0xfe      nothing but the timer
    0xb0, 0x34, 0xe6, 0x43,             //        out  0x43, 0x34      the timer: 1193182 / 5966 = 200 times a second
    0xb0, 0x4e, 0xe6, 0x40,             //        out  0x40, 5966 & 255
    0xb0, 0x17, 0xe6, 0x40,             //        out  0x40, 5966 >> 8
    0xfb,                               //        sti
    0xf4,                               // again: hlt
    0x66, 0x43,                         //        inc  ebx
    0x89, 0xd8,                         //        mov  ax, bx
    0x83, 0xe0, 0x7f,                   //        and  ax, 127
    0xc1, 0xe0, 0x08,                   //        shl  ax, 8
    0x05, 0x00, 0x10,                   //        add  ax, 0x1000
    0x8e, 0xc0,                         //        mov  es, ax
    0x66, 0x89, 0xd9,                   //        mov  ecx, ebx
    0x66, 0x81, 0xe9, 0x80, 0, 0, 0,    //        sub  ecx, 128
    0x76, 0x15,                         //        jbe  fresh
    0x26, 0x66, 0x39, 0x0e, 0x00, 0x00, //        cmp  es:[0], ecx
    0x75, 0x08,                         //        jne  lost
    0x26, 0x66, 0x39, 0x0e, 0xfc, 0x0f, //        cmp  es:[4092], ecx
    0x74, 0x05,                         //        je   fresh
    0xb0, 0x21,                         // lost:  mov  al, '!'
    0xe8, 0x2b, 0x00,                   //        call put
    0x26, 0x66, 0x89, 0x1e, 0x00, 0x00, // fresh: mov  es:[0], ebx
    0x26, 0x66, 0x89, 0x1e, 0xfc, 0x0f, //        mov  es:[4092], ebx
    0xb9, 0x08, 0x00,                   //        mov  cx, 8
    0x66, 0xc1, 0xc3, 0x04,             // digit: rol  ebx, 4
    0x88, 0xd8,                         //        mov  al, bl
    0x24, 0x0f,                         //        and  al, 15
    0x04, 0x30,                         //        add  al, '0'
    0x3c, 0x39,                         //        cmp  al, '9'
    0x76, 0x02,                         //        jbe  show
    0x04, 0x27,                         //        add  al, 'a' - '9' - 1
    0xe8, 0x09, 0x00,                   // show:  call put
    0xe2, 0xeb,                         //        loop digit
    0xb0, 0x0a,                         //        mov  al, '\n'
    0xe8, 0x02, 0x00,                   //        call put
    0xeb, 0xa4,                         //        jmp  again
    0x88, 0xc4,                         // put:   mov  ah, al
    0xba, 0xfd, 0x03,                   //        mov  dx, 0x3fd
    0xec,                               // full:  in   al, dx
    0xa8, 0x20,                         //        test al, 0x20
    0x74, 0xfb,                         //        jz   full
    0x88, 0xe0,                         //        mov  al, ah
    0xba, 0xf8, 0x03,                   //        mov  dx, 0x3f8
    0xee,                               //        out  dx, al
    0xc3,                               //        ret
    0x50,                               // tick:  push ax
    0xb0, 0x20, 0xe6, 0x20,             //        out  0x20, 0x20      the interrupt has been taken
    0x58,                               //        pop  ax
    0xcf,                               //        iret
];
