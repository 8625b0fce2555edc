//! What backends of GPUs need of a user's image: drivers are handed an address without a length, so its size is checked here.
#![forbid(unsafe_code)]

use bytemuck::{Pod, Zeroable};

/// An offload bundle, of several code objects of clang.
const BUNDLE: &[u8] = b"__CLANG_OFFLOAD_BUNDLE__";
/// The same, compressed.
const COMPRESSED_BUNDLE: &[u8] = b"CCOB";
const ELF: &[u8] = b"\x7fELF";
/// A fat binary of nvcc.
const FATBIN: &[u8] = &0xba55_ed50_u32.to_le_bytes();

/// A copy that lives for the rest of the program, aligned to a page, as a linker would place it, and with a zero behind it.
pub fn keep(bytes: &[u8]) -> &'static [u8] {
    #[derive(Clone, Copy, Pod, Zeroable)]
    #[repr(C, align(4096))]
    struct Page([u8; 4096]);
    let mut pages = vec![Page::zeroed(); bytes.len() / size_of::<Page>() + 1];
    bytemuck::cast_slice_mut(&mut pages)[..bytes.len()].copy_from_slice(bytes);
    &bytemuck::cast_slice(pages.leak())[..bytes.len()]
}

/// Says what is wrong with the size of what should be a fat binary, a cubin or the text of PTX.
///
/// # Errors
/// The reason.
pub fn check_cuda(bytes: &[u8]) -> Result<(), String> {
    if bytes.starts_with(FATBIN) {
        // Magic, version, bytes of the header, bytes behind it.
        return check_end(bytes, u64::from(u16_at(bytes, 6)?).checked_add(u64_at(bytes, 8)?));
    }
    if bytes.starts_with(ELF) {
        return check_elf(bytes);
    }
    match std::str::from_utf8(bytes.strip_suffix(&[0]).unwrap_or(bytes)) {
        Ok(text) if text.contains(".version") && text.contains(".target") && !text.contains('\0') => Ok(()),
        _ => Err("it is no fat binary, no cubin and no PTX".to_owned()),
    }
}

/// The same of what should be a code object or a bundle of them.
///
/// # Errors
/// The reason.
pub fn check_hip(bytes: &[u8]) -> Result<(), String> {
    if bytes.starts_with(ELF) {
        return check_elf(bytes);
    }
    if bytes.starts_with(COMPRESSED_BUNDLE) {
        // Magic, version, method, and from version 2 on the bytes of all.
        return match u16_at(bytes, 4)? {
            2 => check_end(bytes, Some(u64::from(u32_at(bytes, 8)?))),
            3 => check_end(bytes, Some(u64_at(bytes, 8)?)),
            version => Err(format!("a compressed bundle of version {version} does not tell its size")),
        };
    }
    if !bytes.starts_with(BUNDLE) {
        return Err("it is no code object and no bundle of them".to_owned());
    }
    // Entries of (offset, size, bytes of the name) and the name.
    let mut at = BUNDLE.len() + 8;
    for _ in 0..u64_at(bytes, BUNDLE.len())? {
        check_end(bytes, u64_at(bytes, at)?.checked_add(u64_at(bytes, at + 8)?))?;
        let name = usize::try_from(u64_at(bytes, at + 16)?).ok();
        at = name.and_then(|name| (at + 24).checked_add(name)).filter(|end| *end <= bytes.len()).ok_or(CUT_OFF)?;
    }
    Ok(())
}

const CUT_OFF: &str = "it is cut off";

/// An ELF file ends with its section headers, or with its last section.
fn check_elf(bytes: &[u8]) -> Result<(), String> {
    let (headers, size, count) = (u64_at(bytes, 40)?, u16_at(bytes, 58)?, u16_at(bytes, 60)?);
    check_end(bytes, (u64::from(size) * u64::from(count)).checked_add(headers))?;
    for section in 0..usize::from(count) {
        let header = headers as usize + section * usize::from(size);
        const NO_BITS: u32 = 8;
        if u32_at(bytes, header + 4)? != NO_BITS {
            check_end(bytes, u64_at(bytes, header + 24)?.checked_add(u64_at(bytes, header + 32)?))?;
        }
    }
    Ok(())
}

fn check_end(bytes: &[u8], end: Option<u64>) -> Result<(), String> {
    match end {
        Some(end) if end <= bytes.len() as u64 => Ok(()),
        _ => Err(CUT_OFF.to_owned()),
    }
}

fn array_at<const N: usize>(bytes: &[u8], at: usize) -> Result<[u8; N], String> {
    let found = at.checked_add(N).and_then(|end| bytes.get(at..end)).and_then(|part| part.try_into().ok());
    found.ok_or_else(|| CUT_OFF.to_owned())
}

fn u16_at(bytes: &[u8], at: usize) -> Result<u16, String> {
    array_at(bytes, at).map(u16::from_le_bytes)
}

fn u32_at(bytes: &[u8], at: usize) -> Result<u32, String> {
    array_at(bytes, at).map(u32::from_le_bytes)
}

fn u64_at(bytes: &[u8], at: usize) -> Result<u64, String> {
    array_at(bytes, at).map(u64::from_le_bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_copy_is_aligned_and_ends_with_a_zero() {
        for len in [0, 1, 4095, 4096, 4097] {
            let bytes: Vec<u8> = (0..len).map(|i| i as u8 | 1).collect();
            let kept = keep(&bytes);
            assert_eq!(kept, bytes);
            assert!(kept.as_ptr().addr().is_multiple_of(4096));
        }
    }

    /// Whole it is taken, and no shorter.
    fn every_cut(check: fn(&[u8]) -> Result<(), String>, whole: &[u8]) {
        assert_eq!(check(whole), Ok(()));
        for len in 0..whole.len() {
            assert!(check(&whole[..len]).is_err(), "{len} bytes of {}", whole.len());
        }
    }

    fn elf() -> Vec<u8> {
        // Two headers in front of the second section's 16 bytes.
        let mut file = [ELF, &[0; 60 + 128 + 16]].concat();
        file[40..48].copy_from_slice(&64u64.to_le_bytes());
        file[58..60].copy_from_slice(&64u16.to_le_bytes());
        file[60..62].copy_from_slice(&2u16.to_le_bytes());
        file[128 + 24..128 + 32].copy_from_slice(&192u64.to_le_bytes());
        file[128 + 32..128 + 40].copy_from_slice(&16u64.to_le_bytes());
        file
    }

    #[test]
    fn images_that_are_cut_off_are_found() {
        every_cut(check_cuda, &elf());
        every_cut(check_hip, &elf());
        let fatbin = [FATBIN, &[1, 0, 16, 0], &24u64.to_le_bytes(), &[0; 24]].concat();
        every_cut(check_cuda, &fatbin);
        let entry = [60u64, 10, 4].map(u64::to_le_bytes).concat();
        let bundle = [BUNDLE, &1u64.to_le_bytes(), &entry, b"name", &[0; 10]].concat();
        every_cut(check_hip, &bundle);
        every_cut(check_hip, &[COMPRESSED_BUNDLE, &[2, 0, 1, 0], &20u32.to_le_bytes(), &[0; 8]].concat());
        assert!(check_hip(&[COMPRESSED_BUNDLE, &[1, 0, 1, 0], &[0; 40]].concat()).is_err());
    }

    #[test]
    fn what_is_no_image_is_refused() {
        assert_eq!(check_cuda(b".version 8.0\n.target sm_90\n.address_size 64\n"), Ok(()));
        assert_eq!(check_cuda(b".version 8.0\n.target sm_90\n\0"), Ok(()));
        for wrong in [&b""[..], b"nothing", b".version 8.0\0.target sm_90", &[0xff; 100]] {
            assert!(check_cuda(wrong).is_err() && check_hip(wrong).is_err());
        }
        // Sizes that wrap around.
        let fatbin = [FATBIN, &[1, 0, 16, 0], &u64::MAX.to_le_bytes(), &[0; 24]].concat();
        let bundle = [BUNDLE, &u64::MAX.to_le_bytes(), &[0xff; 24]].concat();
        assert!(check_cuda(&fatbin).is_err() && check_hip(&bundle).is_err());
    }
}
