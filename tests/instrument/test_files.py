"""Whatever a start does to files, the directory is afterwards as it was."""

import contextlib
import json
import os
import sqlite3
import subprocess
import sys
import tempfile
import textwrap
import time

import pytest
from support.file_states import state_of

from perfsearch.instrument import files, undo, user_files
from perfsearch.instrument.user_files import UserFiles

KEEPING = """
import os, pathlib, shutil, sys, tempfile
from perfsearch.instrument.files import keep_files
keeper = keep_files(sys.argv[1])
"""


class Directory:
    """A directory of a user's, in which starts of a script do something."""

    def __init__(self, path):
        self.path, self.files = path, UserFiles([path / "run"])
        for name in ("out", "out/old", "data", "run"):
            (path / name).mkdir()
        (path / "ckpt.pt").write_bytes(b"weights of last week")
        (path / "train.log").write_text("epoch 1\n")
        (path / "out" / "best.pt").write_text("best")
        (path / "out" / "old" / "a.txt").write_text("a")
        (path / "latest").symlink_to("out/best.pt")
        os.link(path / "ckpt.pt", path / "out" / "same.pt")
        (path / "locked.txt").write_text("locked")
        (path / "locked.txt").chmod(0o640)
        for file in path.rglob("*"):
            if file.is_file() and not file.is_symlink():
                os.utime(file, ns=(10**18, 10**18 + 123))
        self.before = self.state()

    def state(self):
        return state_of(self.path, user_files.ROOM, "run")

    def start(self, program, tool=None):
        where = self.files.begin("no process has this mark")
        text = KEEPING + textwrap.dedent(program)
        done = subprocess.run(
            [sys.executable, "-c", text, where],
            cwd=self.path, capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout

    def check(self):
        self.files.close()
        assert self.state() == self.before
        assert not (self.path / user_files.ROOM).exists()


@pytest.fixture
def directory(tmp_path, monkeypatch):
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    made = Directory(work)
    made.files.open()
    return made


CHANGES = {
    "truncates": "open('ckpt.pt', 'w').write('new')",
    "writes bytes": "pathlib.Path('ckpt.pt').write_bytes(b'new')",
    "writes a new file": "open('new.txt', 'w').write('x')",
    "appends": "open('train.log', 'a').write('more')",
    "appends to a new file": "open('new.log', 'a').write('x'); open('new.log', 'a').write('y')",
    "changes in place": "f = open('ckpt.pt', 'r+'); f.seek(3); f.write('NEW'); f.close()",
    "through a symbolic link": "open('latest', 'w').write('new')",
    "os.open": "os.write(os.open('ckpt.pt', os.O_WRONLY | os.O_TRUNC), b'new')",
    "os.open in place": "os.write(os.open('ckpt.pt', os.O_RDWR), b'new')",
    "os.truncate": "os.truncate('ckpt.pt', 2)",
    "ftruncate": "f = open('ckpt.pt', 'r+b'); f.truncate(1)",
    "removes": "os.remove('ckpt.pt'); pathlib.Path('train.log').unlink(); os.unlink('latest')",
    "removes and makes": "os.remove('ckpt.pt'); open('ckpt.pt', 'w').write('new')",
    "file to directory": "os.remove('ckpt.pt'); os.makedirs('ckpt.pt/x'); open('ckpt.pt/x/y', 'w')",
    "renames away": "os.rename('ckpt.pt', 'ckpt.old'); open('ckpt.pt', 'w').write('new')",
    "renames, then changes": "os.rename('train.log', 'log.1'); open('log.1', 'a').write('more')",
    "renames, then truncates": "os.rename('train.log', 'log.1'); open('log.1', 'w').write('x')",
    "renames back": "os.rename('ckpt.pt', 'x'); os.rename('x', 'ckpt.pt')",
    "swaps": "os.rename('ckpt.pt', 'x'); os.rename('train.log', 'ckpt.pt'); "
    "os.rename('x', 'train.log')",
    "writes atomically": "f = tempfile.NamedTemporaryFile('w', dir='.', delete=False); "
    "f.write('new'); f.close(); os.replace(f.name, 'ckpt.pt')",
    "atomically over a link": "open('t', 'w').write('x'); os.replace('t', 'latest')",
    "link to the newest": "open('n', 'w'); os.remove('latest'); os.symlink('n', 'latest')",
    "hard link": "os.link('ckpt.pt', 'copy.pt'); open('copy.pt', 'a').write('more')",
    "both hard links": "os.remove('ckpt.pt'); open('out/same.pt', 'a').write('more')",
    "makes directories": "os.makedirs('runs/a/b'); open('runs/a/b/c', 'w').write('x')",
    "removes a tree": "shutil.rmtree('out')",
    "removes a tree and makes it": "shutil.rmtree('out'); os.makedirs('out/old/new'); "
    "open('out/best.pt', 'w').write('new')",
    "moves a directory": "os.rename('out', 'out.bak'); os.makedirs('out'); "
    "open('out/best.pt', 'w').write('x'); open('out.bak/best.pt', 'a').write('y')",
    "moves directories on and on": "for n in range(3):\n  os.mkdir('tmp'); "
    "open('tmp/m', 'w').write(str(n)); os.rename('tmp', f'ckpt-{n}')\n"
    "shutil.rmtree('ckpt-0'); shutil.rmtree('out'); os.rename('ckpt-1', 'out')",
    "changes, then moves": "open('out/best.pt', 'w').write('x'); os.rename('out', 'kept'); "
    "os.mkdir('out'); open('out/best.pt', 'w').write('y'); open('kept/best.pt', 'a').write('z')",
    "copies": "shutil.copy('ckpt.pt', 'out/best.pt'); shutil.copytree('out', 'out2')",
    "moves": "shutil.move('ckpt.pt', 'out/best.pt'); shutil.move('out', 'elsewhere')",
    "another mode and time": "os.chmod('locked.txt', 0o777); pathlib.Path('ckpt.pt').touch()",
    "mode of what is written": "open('locked.txt', 'w').write('x'); os.chmod('locked.txt', 0o600)",
    "mode of what is renamed": "os.rename('locked.txt', 'x'); os.chmod('x', 0o600); os.utime('x')",
    "below another directory": "os.chdir('out'); open('best.pt', 'w').write('x'); "
    "open('../new', 'w'); os.remove('../ckpt.pt')",
    "relative to a descriptor": "d = os.open('out', os.O_RDONLY); os.unlink('best.pt', dir_fd=d); "
    "os.mkdir('made', dir_fd=d)",
    "bytes": "open(b'ckpt.pt', 'w').write('x'); os.remove(b'train.log')",
    "a database": "import sqlite3; c = sqlite3.connect('data/d.db'); "
    "c.execute('create table t (a)'); c.commit()",
    "makes a pipe": "os.mkfifo('pipe'); os.mkfifo(path='out/pipe', mode=0o600); "
    "d = os.open('out', os.O_RDONLY); os.mkfifo('second', dir_fd=d)",
    "makes a node": "os.mknod('node'); open('node', 'a').write('x')",
    "removes a pipe that it made": "os.mkfifo('pipe'); os.remove('pipe'); open('pipe', 'w')",
    "binds a socket": "import socket; s = socket.socket(socket.AF_UNIX); s.bind('socket'); "
    "t = socket.socket(); t.bind(('127.0.0.1', 0)); socket.socket(socket.AF_UNIX).bind('')",
    "in a forked process": "p = os.fork()\nif not p:\n  open('ckpt.pt', 'w').write('x'); "
    "os.remove('train.log'); open('by_child', 'w').write('x'); os._exit(0)\nos.waitpid(p, 0)\n"
    "open('by_child', 'a').write('y'); open('ckpt.pt', 'a').write('z')",
    "in threads": "import concurrent.futures as c\nwith c.ThreadPoolExecutor(8) as p:\n  "
    "list(p.map(lambda n: open(f'f{n % 4}', 'w').write('x') and os.path.exists('ckpt.pt') and "
    "open('ckpt.pt', 'a').write('x'), range(64)))",
    "what must fail": "for bad in (lambda: open('ckpt.pt', 'x'), lambda: os.rmdir('out'), "
    "lambda: os.rename('none', 'ckpt.pt'), lambda: os.remove('none'), lambda: os.mkdir('out'), "
    "lambda: open('none/x', 'w')):\n  try: bad()\n  except OSError: continue\n  sys.exit(1)",
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_what_a_start_changed_is_put_back(directory, change):
    directory.start(CHANGES[change])
    if change not in ("renames back", "what must fail"):
        assert directory.state() != directory.before  # so that the test can fail
    directory.files.end()
    assert directory.state() == directory.before
    assert directory.files.not_as_before() == ""
    directory.check()


@pytest.mark.parametrize("renamed", [False, True])
def test_owner_and_attributes_are_put_back(directory, renamed):
    try:
        os.setxattr("locked.txt", "user.had", b"\x00\xff")
    except OSError:
        pytest.skip("the file system has no extended attributes")
    os.setxattr("ckpt.pt", "user.stays", b"as it is")
    directory.before = directory.state()
    program = """
    for name in ('locked.txt', 'ckpt.pt'):
        changed = 'x' if RENAMED else name
        if RENAMED:
            os.rename(name, changed)
        os.setxattr(changed, 'user.new', b'x')
        file = os.open(changed, os.O_RDONLY)
        if os.geteuid() == 0:
            os.fchown(file, 1, 1)
        os.fchmod(file, 0o600)
        if name == 'locked.txt':
            os.removexattr(changed, 'user.had')
        if RENAMED:
            os.rename(changed, f'out/{name}')
    """
    directory.start(program.replace("RENAMED", str(renamed)))
    assert directory.state() != directory.before
    directory.check()


def test_a_start_finds_what_it_wrote_itself(directory):
    text = directory.start(
        """
        open('ckpt.pt', 'w').write('one')
        open('train.log', 'a').write('epoch 2\\n')
        os.rename('out/best.pt', 'out/former.pt')
        print(open('ckpt.pt').read(), open('train.log').read().split(), os.listdir('out'))
        """
    )
    assert "one ['epoch', '1', 'epoch', '2']" in text and "former.pt" in text
    directory.check()


def test_no_start_finds_what_an_earlier_one_saved(directory):
    program = "print(os.path.exists('snapshot.pt'), open('ckpt.pt').read())\n"
    program += "open('snapshot.pt', 'w').write('x'); open('ckpt.pt', 'w').write('x')"
    for _ in range(3):
        assert directory.start(program) == "False weights of last week\n"
        directory.files.end()
    directory.check()


def test_downloads_stay_until_the_search_ends(directory):
    program = """
    print(os.path.exists('data/set/part0'), os.path.exists('args.json'), os.path.exists('log'))
    open('args.json', 'w').write('{}')
    if not os.path.exists('data/set'):
        os.mkdir('data/set')
        for part in range(3):
            open(f'data/set/part{part}', 'w').write('x' * 2**19)
    open('data/set/part1').read()
    open('log', 'w').write('begun')
    open('log').read()
    keeper.first_step()
    open('log', 'a').write('step')
    open('data/set/after', 'w').write('x')
    """
    assert directory.start(program) == "False False False\n"
    directory.files.end()
    assert sorted(os.listdir("data/set")) == ["part0", "part1", "part2"]
    assert directory.start(program) == "True False False\n"
    directory.files.end()
    assert sorted(os.listdir("data/set")) == ["part0", "part1", "part2"]
    directory.check()


def test_a_small_file_that_a_start_reads_back_is_not_found_by_the_next(directory):
    program = """
    print(os.path.exists('state.json'), os.path.exists('exp'))
    open('state.json', 'w').write('{}')
    open('state.json').read()
    os.mkdir('exp')
    open('exp/config.json', 'w').write('{}')
    open('exp/config.json').read()
    keeper.first_step()
    """
    for _ in range(2):
        assert directory.start(program) == "False False\n"
        directory.files.end()
    directory.check()


def test_a_database_named_by_a_uri_is_put_back(directory):
    program = """
    import sqlite3
    for name in ('file:plain.db', 'file:a%20b.db?mode=rwc', 'file:mine.db'):
        connection = sqlite3.connect(name, uri=True)
        connection.execute('create table if not exists u (x)')
        connection.execute('insert into u values (1)')
        connection.commit()
    print(sorted(name for name in os.listdir() if name.endswith('.db')))
    """
    made = sqlite3.connect("mine.db")
    made.execute("create table t (x)")
    made.close()
    directory.before = directory.state()
    assert directory.start(program) == "['a b.db', 'mine.db', 'plain.db']\n"
    directory.check()


def test_large_files_are_not_copied(directory):
    with open("huge.pt", "wb") as file:
        file.truncate(40 * 2**30)
    directory.before = directory.state()
    directory.start(
        """
        open('huge.pt', 'w').write('new')
        os.rename('huge.pt', 'huge.old')
        os.remove('huge.old')
        """
    )
    kept = list((directory.path / user_files.ROOM).rglob("kept/*"))
    assert [p.stat().st_blocks for p in kept] == [0]
    directory.check()


def test_a_large_file_that_is_appended_to_is_named(directory):
    with open("huge.bin", "wb") as file:
        file.truncate(40 * 2**30)
    directory.before = directory.state()
    directory.start("open('huge.bin', 'ab').write(b'x')")
    directory.files.end()
    if directory.state() != directory.before:  # the file system cannot share blocks
        assert "huge.bin" in directory.files.not_as_before()
        assert os.path.getsize("huge.bin") == 40 * 2**30 + 1
    directory.files.close()


def test_what_other_programs_did_is_named(directory):
    directory.start("import subprocess; subprocess.run(['touch', 'out/by_program'], check=True)")
    directory.files.end()
    assert "out/by_program" in directory.files.not_as_before()


def test_files_of_perfsearch_caches_and_temporary_ones_are_left_alone(directory, monkeypatch):
    monkeypatch.setenv("TORCH_HOME", str(directory.path / "cache"))
    directory.start(
        """
        os.mkdir('cache'); open('cache/w', 'w').write('x')
        open('run/mine', 'w').write('x')
        """
    )
    directory.files.end()
    assert os.path.exists("cache/w") and os.path.exists("run/mine")


@pytest.mark.parametrize(
    "change",
    [
        "os.remove('ckpt.pt')",
        "os.rename('ckpt.pt', 'other.pt')",
        "os.replace('train.log', 'ckpt.pt')",
        "os.chmod('ckpt.pt', 0o600)",
        "os.mkdir('made')",
    ],
)
def test_what_cannot_be_put_on_record_is_not_done(directory, change):
    """On a full disk, and where descriptors are used up, which it takes no further one to do."""
    told = directory.start(
        f"""
        import errno, resource

        def attempt():
            try:
                {change}
            except OSError as error:
                print(errno.errorcode[error.errno])

        resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))
        attempt()
        """
    )
    assert told == "EMFILE\n"
    directory.check()


def test_an_entry_for_which_there_is_no_room_is_not_left_half(tmp_path):
    record = files.Record(str(tmp_path))
    (tmp_path / undo.RECORD).symlink_to("/dev/full")
    with record.turn(), pytest.raises(OSError, match="No space left"):
        record.say(undo.Deed.MADE, "a")
    assert record.known == set()


def test_two_starts_worth_of_ranks_may_write_the_same_file(directory):
    where = directory.files.begin("none")
    program = KEEPING + "for n in range(50):\n  open('ckpt.pt', 'w').write('x')\n"
    program += "  open('new', 'a').write('x'); open('train.log', 'a').write('x')\n"
    program += "  os.makedirs('made/by/both', exist_ok=True)\n"
    ranks = [subprocess.Popen([sys.executable, "-c", program, where]) for _ in range(2)]
    assert [rank.wait(60) for rank in ranks] == [0, 0]
    directory.check()


@contextlib.contextmanager
def broken_off(monkeypatch, times):
    """Interrupt what is done within, once it has put so many files in their places."""
    left, replace = times, os.replace

    def breaking(*args):
        nonlocal left
        left -= 1
        if left < 0:
            raise KeyboardInterrupt
        replace(*args)

    monkeypatch.setattr(os, "replace", breaking)
    with pytest.raises(KeyboardInterrupt):
        yield
    monkeypatch.setattr(os, "replace", replace)


@pytest.mark.parametrize("times", range(4))
def test_an_undo_that_is_broken_off_is_taken_up_again(directory, monkeypatch, times):
    directory.start(
        "shutil.rmtree('out'); os.rename('ckpt.pt', 'x'); open('train.log', 'a').write('x'); "
        "os.makedirs('out/old'); open('out/old/b', 'w').write('x')"
    )
    with broken_off(monkeypatch, times):
        directory.files.end()
    directory.check()


def test_the_next_search_undoes_what_a_killed_one_left(directory):
    program = f"""
import os, sys
sys.path[:0] = {sys.path!r}
from perfsearch.instrument.user_files import UserFiles
files = UserFiles()
print(files.begin('none'), flush=True)
sys.stdin.read()
"""
    controller = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    where = controller.stdout.readline().strip()
    text = KEEPING + "os.remove('ckpt.pt'); open('new', 'w'); shutil.rmtree('out')"
    subprocess.run([sys.executable, "-c", text, where], check=True)
    assert user_files.recover(directory.path) == undo.Undone()  # it still runs
    assert not os.path.exists("ckpt.pt")
    controller.kill()
    controller.wait()
    (said,) = UserFiles().open()
    assert said.startswith("put back what a killed search had changed: ckpt.pt, ")
    assert directory.state() == directory.before
    assert not (directory.path / user_files.ROOM).exists()


AT_ONCE = """
open('ckpt.pt', 'a' if {number} % 2 else 'w').write('{number}')
os.remove('train.log') if os.path.exists('train.log') else open('train.log', 'w').write('{number}')
os.makedirs('runs/{who}', exist_ok=True)
open('runs/last', 'w').write('{who}')
os.replace('runs/last', 'out/best.pt')
"""


def at_once(directory, where, order):
    """Let starts that are there at the same time act in turn, each in processes of its own."""
    for number, who in enumerate(order):
        text = KEEPING + AT_ONCE.format(number=number, who=who)
        words = [sys.executable, "-c", text, where[who]]
        subprocess.run(words, cwd=directory.path, check=True, timeout=120)


@pytest.mark.parametrize("order", ["ab", "ba", "aba", "baab"])
def test_what_starts_at_the_same_time_changed_is_put_back(directory, order):
    files = directory.files
    where = {who: files.begin(who) for who in "ab"}
    at_once(directory, where, order)
    files.end("a")
    assert directory.state() != directory.before  # the other may be about to read it
    at_once(directory, {"b": where["b"]}, "b")
    assert not files.changed
    here = {os.path.relpath(path, directory.path) for path in files.changed_by_now()}
    assert {"ckpt.pt", "train.log", "out/best.pt", "runs", "runs/a", "runs/b"} <= here
    files.end("b")
    assert directory.state() == directory.before
    assert {os.path.relpath(path, directory.path) for path in files.changed} == here
    directory.check()


@pytest.mark.parametrize("times", range(3))
def test_an_undo_of_several_starts_that_is_broken_off_can_be_done_again(
    directory, monkeypatch, times
):
    files = directory.files
    at_once(directory, {who: files.begin(who) for who in "ab"}, "bab")
    files.end("a")
    with broken_off(monkeypatch, times):
        files.end("b")
    files.end()
    directory.check()


def test_the_next_search_undoes_what_starts_at_the_same_time_left(directory):
    program = f"""
import os, sys
sys.path[:0] = {sys.path!r}
from perfsearch.instrument.user_files import UserFiles
files = UserFiles()
print(files.begin('a'), files.begin('b'), flush=True)
sys.stdin.read()
"""
    controller = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    where = dict(zip("ab", controller.stdout.readline().split(), strict=True))
    at_once(directory, where, "bab")
    controller.kill()
    controller.wait()
    (said,) = UserFiles().open()
    assert said.startswith("put back what a killed search had changed: ckpt.pt, ")
    assert directory.state() == directory.before
    assert not (directory.path / user_files.ROOM).exists()


def test_git_sees_nothing_of_what_is_set_aside(directory):
    subprocess.run(["git", "init", "-q"], cwd=directory.path, check=True)
    directory.start("open('ckpt.pt', 'w').write('new')")
    said = subprocess.run(
        ["git", "status", "--short", "-uall"],
        cwd=directory.path, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    assert "ckpt.pt" in said and user_files.ROOM not in said
    directory.files.close()
    assert not (directory.path / user_files.ROOM).exists()


def left_by_a_killed_search(directory, text, **owner):
    """Have a start change files whose search then ends without a word, some minutes ago."""
    files = UserFiles(directory=directory.path)
    where = files.begin("none")
    subprocess.run([sys.executable, "-c", KEEPING + text, where], check=True)
    files._closed.set()
    (room,) = (directory.path / user_files.ROOM).glob("*/owner.json")
    entry = {**json.loads(room.read_text()), "controller": [2**22, 1.0], **owner}
    room.write_text(json.dumps(entry))
    return room


def silent_for(room, seconds):
    now = time.time()
    os.utime(room, (now, now - seconds))


def test_what_the_user_made_after_a_kill_is_left_and_what_was_kept_put_beside_it(directory):
    room = left_by_a_killed_search(
        directory,
        "open('ckpt.pt', 'w').write('of a trial'); open('new.txt', 'w').write('of a trial')\n"
        "open('train.log', 'a').write('of a trial')",
    )
    silent_for(room, 600)
    kept = (directory.path / "train.log").read_bytes()
    lines = UserFiles(directory=directory.path).open()
    assert any("left as they are: ckpt.pt, new.txt, train.log" in line for line in lines)
    assert (directory.path / "ckpt.pt").read_text() == "of a trial"
    assert (directory.path / "new.txt").read_text() == "of a trial"
    assert (directory.path / "train.log").read_bytes() == kept
    for name in ("ckpt.pt", "train.log"):
        aside = directory.path / f"{name}{undo.ASIDE}"
        assert aside.read_bytes() == directory.before[name][0]
    assert not (directory.path / user_files.ROOM).exists()


LOSES = (
    "open('ckpt.pt', 'w').write('of a trial'); open('new.txt', 'w').write('of a trial')\n"
    "open('train.log', 'a').write('of a trial'); os.rename('out', 'gone'); os.remove('latest')"
)


def contents(state):
    """What a directory holds, but for the inodes."""
    return {path: seen if seen[0] == "directory" else seen[:-1] for path, seen in state.items()}


def test_a_directory_that_was_moved_after_a_kill_is_put_back_where_it_is(directory, monkeypatch):
    left_by_a_killed_search(directory, LOSES)
    moved = directory.path.parent / "moved"
    directory.path.rename(moved)
    monkeypatch.chdir(moved)
    (said,) = UserFiles().open()
    assert said.startswith("put back what a killed search had changed: ckpt.pt, ")
    assert state_of(moved, "run") == directory.before
    assert not directory.path.exists()


def test_a_copy_made_after_a_kill_is_put_back_and_leaves_the_original_alone(directory, monkeypatch):
    monkeypatch.setattr(user_files, "_ANOTHERS_S", 0.0)  # no time between the kill and the copy
    owner = left_by_a_killed_search(directory, LOSES)
    os.utime(owner)
    time.sleep(1.2)  # longer than between two signs of life
    (directory.path / "mine.txt").write_text("made after the kill")
    (directory.path / "new.txt").write_text("made after the kill")
    copy = directory.path.parent / "copy"
    subprocess.run(["cp", "-a", directory.path, copy], check=True)
    original = state_of(directory.path)

    monkeypatch.chdir(copy)
    lines = UserFiles().open()
    assert "left as they are: new.txt;" in lines[1]
    assert state_of(directory.path) == original
    mine = {"mine.txt", "new.txt"}
    found = {k: v for k, v in contents(state_of(copy, "run")).items() if k not in mine}
    assert found == contents(directory.before)
    assert {(copy / name).read_text() for name in mine} == {"made after the kill"}

    monkeypatch.chdir(directory.path)
    UserFiles().open()
    found = {k: v for k, v in directory.state().items() if k not in mine}
    assert found == directory.before


def test_a_room_without_the_path_of_its_directory_is_undone_where_it_was_made(directory):
    owner = left_by_a_killed_search(directory, LOSES)
    entry = json.loads(owner.read_text())
    entry.pop("tree", None)
    owner.write_text(json.dumps(entry))
    UserFiles(directory=directory.path).open()
    assert directory.state() == directory.before


def test_what_cannot_be_put_back_stays_kept_is_named_and_tried_again(directory):
    room = left_by_a_killed_search(directory, "os.remove('ckpt.pt'); os.remove('train.log')").parent
    (directory.path / "ckpt.pt").mkdir()
    (directory.path / "ckpt.pt" / "mine").write_text("in its place")
    for _ in range(2):
        files = UserFiles(directory=directory.path)
        said = files.open()[-1]
        assert f"{user_files.ROOM}/{room.name} keeps files" in said and "put back: ckpt.pt." in said
        assert [p.read_bytes() for p in room.glob("*/kept/*")] == [b"weights of last week"]
        assert "ckpt.pt" in files.not_as_before() and "train.log" not in files.not_as_before()
    (directory.path / "ckpt.pt" / "mine").unlink()
    assert "ckpt.pt" in UserFiles(directory=directory.path).open()[0]
    assert directory.state() == directory.before
    assert not (directory.path / user_files.ROOM).exists()


def test_a_search_that_cannot_put_back_at_its_end_says_where_the_file_is(directory):
    directory.start("os.remove('ckpt.pt')")
    (directory.path / "ckpt.pt").mkdir()
    (directory.path / "ckpt.pt" / "mine").write_text("in its place")
    directory.files.close()
    said = directory.files.not_as_before()
    assert "ckpt.pt" in said and f"is kept in {user_files.ROOM}/" in said
    kept = list((directory.path / user_files.ROOM).glob("*/*/kept/*"))
    assert [p.read_bytes() for p in kept] == [b"weights of last week"]


def test_a_kept_file_without_its_record_is_never_removed(directory):
    room = left_by_a_killed_search(directory, "os.remove('ckpt.pt')").parent
    (record,) = room.glob("*/record.jsonl")
    record.write_bytes(b"")  # as a crash of the machine may leave it
    said = UserFiles(directory=directory.path).open()[-1]
    assert "which ones is not on record" in said
    assert [p.read_bytes() for p in room.glob("*/kept/*")] == [b"weights of last week"]


def kept_entry(path, at):
    """An entry of a file that is kept somewhere."""
    entry = {"deed": undo.Deed.KEPT, "path": str(path), "at": str(at)}
    return {**entry, "mode": 0o644, "times": [10**18, 10**18]}


def test_a_file_kept_on_another_file_system_is_put_back(directory):
    if not os.access("/dev/shm", os.W_OK):
        pytest.skip("there is no other file system")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as other:
        at = os.path.join(other, "1-2")
        with open(at, "w") as file:
            file.write("kept")
        if os.stat(at).st_dev == os.stat(".").st_dev:
            pytest.skip("there is no other file system")
        done = undo.undo([kept_entry(directory.path / "ckpt.pt", at)])
        assert not done.lost and not done.left and not os.listdir(other)
    assert (directory.path / "ckpt.pt").read_text() == "kept"


def test_what_is_kept_where_nothing_is_mounted_counts_as_kept_still(directory):
    here = kept_entry(directory.path / "ckpt.pt", directory.path / "run" / "put-back")
    away = kept_entry(directory.path / "ckpt.pt", directory.path / "not-mounted" / "1-2")
    assert undo.undo([here]) == undo.Undone()
    assert undo.undo([away]).left == [away]


def test_a_search_of_another_host_is_undone_once_it_is_surely_dead(directory, monkeypatch):
    room = left_by_a_killed_search(directory, "open('ckpt.pt', 'w').write('x')", host="elsewhere")
    (said,) = UserFiles(directory=directory.path).open()
    assert "on host elsewhere, which may still run" in said
    assert (directory.path / "ckpt.pt").read_text() == "x"
    silent_for(room, 130)
    # as if the file had been changed so long ago
    monkeypatch.setattr(user_files, "_ANOTHERS_S", 1000.0)
    (said,) = UserFiles(directory=directory.path).open()
    assert said == "put back what a killed search had changed: ckpt.pt"
    assert directory.state() == directory.before


def test_what_torch_and_others_write_outside_of_python_is_kept(directory):
    directory.start(
        """
        import torch
        torch.save(torch.ones(3), 'ckpt.pt')
        torch.save(torch.ones(3), pathlib.Path('new.pt'))
        torch.save(torch.ones(3), 'old.pt', _use_new_zipfile_serialization=False)
        module = torch.jit.script(torch.nn.Linear(2, 2))
        torch.jit.save(module, 'out/best.pt')
        module.save('jit.pt')
        import numpy
        numpy.save('train.log', numpy.ones(3)); numpy.ones(3).tofile('raw')
        m = numpy.memmap('locked.txt', mode='r+'); m[0] = 3; m.flush()
        print(torch.load('ckpt.pt').sum())
        """
    )
    directory.check()


def test_what_tokenizers_write_is_undone(directory):
    """Their files are written by Rust, of which Python does not tell."""
    pytest.importorskip("tokenizers")
    directory.start(
        """
        import os
        from tokenizers import Tokenizer
        from tokenizers.models import WordLevel
        words = Tokenizer(WordLevel({'a': 0}, 'a'))
        os.mkdir('trained')
        words.save('trained/tokenizer.json')
        words.save(path='trained/again.json', pretty=True)
        words.save('ckpt.pt')
        """
    )
    directory.check()


def test_safetensors_are_kept(directory):
    pytest.importorskip("safetensors")
    directory.start(
        """
        import torch
        from safetensors.torch import save_file
        save_file({'a': torch.ones(3)}, 'ckpt.pt')
        save_file({'a': torch.ones(3)}, 'new.safetensors')
        """
    )
    directory.check()
