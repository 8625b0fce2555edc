//! Compiled images, kept by the hash of everything that went into them.

use std::fs;
use std::path::{Path, PathBuf};

use crate::toolchain::{self, Result, env, env_path};

/// FNV-1a, 128 bits, over fields with their lengths. It only has to tell one's own builds apart.
pub(crate) struct Key(u128);

impl Key {
    pub(crate) fn new(target: &str) -> Self {
        let mut key = Key(0x6c62_272e_07bb_0142_62b8_2175_6295_c58d);
        // Raise this number when the build script makes something else of the same input.
        key.field(b"signal image 1");
        key.field(target.as_bytes());
        key
    }

    pub(crate) fn field(&mut self, bytes: &[u8]) {
        for byte in (bytes.len() as u64).to_le_bytes().iter().chain(bytes) {
            self.0 = (self.0 ^ u128::from(*byte)).wrapping_mul(0x0000_0000_0100_0000_0000_0000_0000_013b);
        }
    }

    pub(crate) fn fields(&mut self, list: &[String]) {
        self.field(&(list.len() as u64).to_le_bytes());
        for text in list {
            self.field(text.as_bytes());
        }
    }

    /// The names and contents of the files that an image of `target` is made of.
    pub(crate) fn sources(&mut self, package: &Path, target: &str) -> Result<()> {
        for folder in ["signal", target] {
            let mut files = Vec::new();
            list_files(&package.join("kernels").join(folder), &mut files)?;
            files.sort();
            for file in files {
                let name = file.strip_prefix(package).unwrap_or(&file);
                self.field(name.to_string_lossy().as_bytes());
                self.field(&toolchain::read(&file)?);
            }
        }
        Ok(())
    }

    /// A number that ranks can compare.
    pub(crate) fn fingerprint(&self) -> u64 {
        (self.0 >> 64) as u64 ^ self.0 as u64
    }
}

fn list_files(folder: &Path, files: &mut Vec<PathBuf>) -> Result<()> {
    let error = |e: std::io::Error| format!("{}: {e}", folder.display());
    if !folder.exists() {
        return Ok(());
    }
    for entry in fs::read_dir(folder).map_err(error)? {
        let path = entry.map_err(error)?.path();
        if path.is_dir() {
            list_files(&path, files)?;
        } else {
            files.push(path);
        }
    }
    Ok(())
}

/// A folder of images named by their keys.
pub(crate) struct Cache {
    folder: PathBuf,
}

impl Cache {
    /// In `SIGNAL_IMAGE_CACHE`, else beside the profiles in Cargo's target folder.
    pub(crate) fn open(out: &Path) -> Result<Self> {
        if let Some(folder) = env_path("SIGNAL_IMAGE_CACHE")? {
            return Ok(Cache { folder });
        }
        // OUT_DIR is TARGET_DIR[/TRIPLE]/PROFILE/build/..., and the triple's folder shares the cache.
        let profile = out.ancestors().find(|folder| folder.ends_with("build")).and_then(Path::parent);
        let mut folder = profile.and_then(Path::parent).unwrap_or(out);
        if folder.ends_with(env("TARGET")?) {
            folder = folder.parent().unwrap_or(folder);
        }
        Ok(Cache { folder: folder.join("signal-images") })
    }

    /// Copies the image of this key to `to`, or has `make` write it there and keeps it.
    pub(crate) fn get(&self, key: &Key, to: &Path, make: impl FnOnce() -> Result<()>) -> Result<()> {
        let kept = self.folder.join(format!("{:032x}", key.0));
        if fs::copy(&kept, to).is_ok_and(|bytes| bytes > 0) {
            return Ok(());
        }
        make()?;
        // Another build may be doing the same: whole files only, by rename.
        let partial = self.folder.join(format!("{:032x}.{}", key.0, std::process::id()));
        let keep = fs::create_dir_all(&self.folder)
            .and_then(|()| fs::copy(to, &partial))
            .and_then(|_| fs::rename(&partial, &kept));
        if let Err(e) = keep {
            println!("cargo::warning=the image is not kept in {}: {e}", self.folder.display());
        }
        Ok(())
    }
}
