use std::fs;
use std::path::PathBuf;

use super::files::Adapter;
use super::*;

fn folder(name: &str) -> PathBuf {
    let path = std::env::temp_dir().join(format!("kv-core-{name}-{}", std::process::id()));
    fs::create_dir_all(&path).unwrap();
    path
}

fn config(device: &str, folder: PathBuf) -> StoreConfig {
    StoreConfig {
        device: device.to_string(),
        layout: "slab".to_string(),
        adapter: "fs".to_string(),
        model_name: "some/model".to_string(),
        folder,
        chunk_bytes: 130_000,
        slots: 16,
        depth: 4,
        io: "auto".to_string(),
        direct: true,
        fsync: false,
        verify: true,
        preallocate: true,
        reserve_bytes: 0,
        keep_files: false,
    }
}

fn files(base: &StoreConfig) -> StoreConfig {
    StoreConfig { layout: "files".to_string(), ..base.clone() }
}

fn ops(write: bool, keys: std::ops::Range<u64>) -> Vec<Op> {
    keys.map(|key| Op { id: key, write, slot: key % 16, key, source: None }).collect()
}

fn all(store: &mut Store, ops: Vec<Op>) -> Vec<Done> {
    store.submit(ops).unwrap();
    store.poll(usize::MAX, Duration::from_secs(30)).unwrap()
}

#[test]
fn what_was_written_is_read_again_by_every_way() {
    let at = folder("ways");
    for (device, io, fsync) in
        [("file", "auto", false), ("file", "auto", true), ("file", "threads", true), ("ram", "auto", false)]
    {
        let config = StoreConfig { io: io.to_string(), fsync, ..config(device, at.clone()) };
        let mut store = Store::new(config).unwrap();
        for (write, keys) in [(true, 0..16), (false, 0..16)] {
            let done = all(&mut store, ops(write, keys));
            assert_eq!(done.len(), 16);
            assert!(done.iter().all(|one| one.error.is_none() && one.bytes == 131_072), "{done:?}");
            assert!(done.iter().all(|one| one.queued_s <= one.began_s && one.began_s <= one.ended_s));
        }
        let other = all(&mut store, vec![Op { id: 0, write: false, slot: 3, key: 4, source: None }]);
        assert!(other[0].error.as_ref().is_some_and(|text| text.starts_with("content differs")));
        assert_eq!(store.pending(), 0);
    }
    assert_eq!(fs::read_dir(&at).unwrap().count(), 0, "a file stayed behind");
    fs::remove_dir(at).unwrap();
}

#[test]
fn a_copy_around_the_caches_is_a_copy() {
    for len in [4096, (1 << 20) - 64, 1 << 20, (3 << 20) + 4096, (1 << 20) + 8] {
        let mut from = buffer::Buffer::new(len, true).unwrap();
        let mut to = buffer::Buffer::new(len + 4096, true).unwrap();
        from.bytes_mut().iter_mut().enumerate().for_each(|(at, byte)| *byte = (at * 31 % 251) as u8);
        // SAFETY: two mappings, each at least as long.
        unsafe { memory::copy(from.at(0), to.at(0), len) };
        assert_eq!(from.bytes_mut()[..len], to.bytes_mut()[..len]);
        assert!(to.bytes_mut()[len..].iter().all(|&byte| byte == 0), "{len}: more than was asked for");
    }
}

#[test]
fn a_source_outlives_its_store() {
    let at = folder("sources");
    let mut memory = Store::new(config("ram", at.clone())).unwrap();
    assert_eq!(all(&mut memory, ops(true, 0..16)).len(), 16);
    let mut store = Store::new(config("file", at.clone())).unwrap();
    let number = store.take_from(memory.slots().unwrap()).unwrap();
    store
        .submit(
            (0..16)
                .map(|key| Op { id: key, write: true, slot: key, key, source: Some((number, key)) })
                .collect(),
        )
        .unwrap();
    drop(memory);
    let done = store.poll(usize::MAX, Duration::from_secs(30)).unwrap();
    assert!(
        done.len() == 16 && done.iter().all(|one| one.error.is_none() && one.bytes == 131_072),
        "{done:?}"
    );
    assert!(all(&mut store, ops(false, 0..16)).iter().all(|one| one.error.is_none()));
    assert!(store.slots().is_none(), "a file lends no memory");
    drop(store);
    fs::remove_dir(at).unwrap();
}

#[test]
fn null_moves_nothing_and_answers_everything() {
    let mut store = Store::new(config("null", PathBuf::new())).unwrap();
    assert_eq!(all(&mut store, ops(true, 0..1000)).len(), 1000);
    assert!(store.submit(vec![Op { id: 0, write: true, slot: 16, key: 0, source: None }]).is_err());
}

#[test]
fn a_kept_file_that_is_cut_short_fails_operations_and_nothing_else() {
    let at = folder("cut");
    for io in ["auto", "threads"] {
        let config = StoreConfig { keep_files: true, io: io.to_string(), ..config("file", at.clone()) };
        let mut store = Store::new(config.clone()).unwrap();
        assert!(Store::new(config).is_err_and(|text| text.contains("exists already")));
        let path = store.path().unwrap().to_path_buf();
        assert!(all(&mut store, ops(true, 0..16)).iter().all(|one| one.error.is_none()));
        fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(8 * 131_072 + 4096).unwrap();
        let done = all(&mut store, ops(false, 0..16));
        let failed: Vec<u64> = done.iter().filter(|one| one.error.is_some()).map(|one| one.id).collect();
        assert_eq!(failed.len(), 8);
        assert!(failed.iter().all(|id| *id >= 8));
        let cut = done.iter().find(|one| one.id == 8).unwrap();
        assert_eq!(cut.bytes, 4096);
        assert!(cut.error.as_ref().unwrap().contains("truncated"));
        drop(store);
        fs::remove_file(path).unwrap();
    }
    fs::remove_dir(at).unwrap();
}

#[test]
fn what_cannot_work_is_refused_on_one_line() {
    let at = folder("refusals");
    let base = config("file", at.clone());
    let bad = [
        (StoreConfig { reserve_bytes: u64::MAX / 2, ..base.clone() }, "reserve"),
        (StoreConfig { folder: at.join("absent"), ..base.clone() }, "no folder"),
        (StoreConfig { folder: PathBuf::from("/proc"), ..base.clone() }, "folder"),
        (StoreConfig { slots: u64::MAX / 2, ..base.clone() }, "too large"),
        (StoreConfig { depth: 0, ..base.clone() }, "depth"),
        (StoreConfig { device: "tape".to_string(), ..base.clone() }, "tape"),
        (StoreConfig { io: "magic".to_string(), ..base.clone() }, "magic"),
        (StoreConfig { layout: "heap".to_string(), ..base.clone() }, "heap"),
        (StoreConfig { adapter: "nfs".to_string(), ..files(&base) }, "nfs"),
        (StoreConfig { fsync: true, ..files(&base) }, "fsync"),
        (StoreConfig { reserve_bytes: u64::MAX / 2, ..files(&base) }, "reserve"),
        (StoreConfig { folder: at.join("absent/too"), ..files(&base) }, "in no folder"),
        (files(&base), "exists already"),
    ];
    for (config, word) in bad {
        let text = Store::new(config).err().unwrap();
        assert!(text.contains(word) && !text.contains('\n'), "{text}");
    }
    fs::remove_dir(at).unwrap();
}

#[test]
fn a_store_dropped_with_work_under_way_waits_for_it() {
    let at = folder("drop");
    for io in ["auto", "threads"] {
        let config = StoreConfig { io: io.to_string(), ..config("file", at.clone()) };
        let mut store = Store::new(config).unwrap();
        store.submit(ops(true, 0..16)).unwrap();
        store.poll(1, Duration::ZERO).unwrap();
    }
    assert_eq!(fs::read_dir(&at).unwrap().count(), 0);
    fs::remove_dir(at).unwrap();
}

#[test]
fn files_are_written_read_and_deleted_one_by_one_and_their_folder_goes() {
    let above = folder("files");
    for (adapter, direct, bytes) in [
        ("fs", false, 130_000),
        ("fs", true, 130_000),
        ("fs_native", true, 131_072),
        ("fs_native", false, 130_000),
    ] {
        let base = StoreConfig { adapter: adapter.to_string(), direct, ..config("file", above.join("kv")) };
        let mut store = Store::new(files(&base)).unwrap();
        assert_eq!((store.slot_bytes(), store.buffered_because().is_none()), (bytes, bytes == 131_072));
        for (write, keys) in [(true, 0..16), (false, 0..16)] {
            let done = all(&mut store, ops(write, keys));
            assert!(done.iter().all(|one| one.error.is_none() && one.bytes == bytes), "{done:?}");
            assert_eq!(done.len(), 16);
            if adapter == "fs" {
                assert!(
                    done.windows(2).all(|pair| pair[0].id < pair[1].id && pair[0].ended_s <= pair[1].began_s)
                );
            }
        }
        let names =
            |at: &Path| fs::read_dir(at).unwrap().map(|entry| entry.unwrap().path()).collect::<Vec<_>>();
        assert_eq!(names(&above.join("kv")).len(), 16);
        let again = all(&mut store, ops(true, 3..4));
        assert!(again[0].error.as_ref().is_some_and(|text| text.contains("exists")), "{again:?}");
        store.forget(&[3, 99]);
        assert_eq!(names(&above.join("kv")).len(), 15);
        assert!(all(&mut store, ops(false, 3..4))[0].error.is_some());
        let cut = above.join("kv").join(format!("some-SEP-model@0x01000100@0@{:064x}.data", 5));
        fs::OpenOptions::new().write(true).open(cut).unwrap().set_len(4096).unwrap();
        assert!(
            all(&mut store, ops(false, 5..6))[0]
                .error
                .as_ref()
                .is_some_and(|text| text.contains("4096 bytes"))
        );
        assert_eq!(store.pending(), 0);
        drop(store);
        assert_eq!(names(&above), Vec::<PathBuf>::new());
    }
    let mut kept =
        Store::new(StoreConfig { keep_files: true, ..files(&config("file", above.join("kept"))) }).unwrap();
    all(&mut kept, ops(true, 0..2));
    assert_eq!(kept.path(), Some(above.join("kept").as_path()));
    drop(kept);
    assert_eq!(fs::read_dir(above.join("kept")).unwrap().count(), 2);
    fs::remove_dir_all(above).unwrap();
}

#[test]
fn a_transfer_is_cut_into_stretches_as_the_native_adapter_does() {
    let sizes = |adapter: Adapter, count: u64| {
        adapter.parts(ops(true, 0..count)).iter().map(VecDeque::len).collect::<Vec<_>>()
    };
    assert_eq!(sizes(Adapter::FsNative, 10), [3, 3, 2, 2]); // seen by strace
    assert_eq!(sizes(Adapter::FsNative, 2), [1, 1]);
    assert_eq!(sizes(Adapter::Fs, 10), [10]);
    assert_eq!(sizes(Adapter::FsNative, 0), [0]);
}
