"""Only a signature finds forgery; its key stays outside the folder and is nobody else's business."""

import os
from pathlib import Path

import pytest

from splitveil.__main__ import main
from splitveil.manifest import changing, problems
from splitveil.manifest.signing import new_key, sign, signed_by
from splitveil.registry import UserError


@pytest.fixture
def folder(begun: Path) -> Path:
    with changing(begun) as step:
        step.write("schema.json", b"{}")
        step.write("summary.json", b'{"ssim": 0.9}')
    return begun


@pytest.fixture
def key(tmp_path: Path) -> Path:
    new_key(tmp_path / "keys" / "mine")
    return tmp_path / "keys" / "mine"


def public(key: Path) -> Path:
    return key.with_name(f"{key.name}.pub")


def test_a_signed_folder_is_whose_it_says(folder: Path, key: Path):
    assert signed_by(folder) is None
    owner = sign(folder, key)
    assert signed_by(folder, public(key)) == signed_by(folder) == owner
    assert problems(folder) == []
    assert key.stat().st_mode & 0o777 == 0o600
    private = b"".join(key.read_bytes().splitlines()[1:-1])
    assert all(private not in path.read_bytes() for path in folder.iterdir())


def test_a_forged_folder_with_a_manifest_that_fits_is_found_by_the_signature_only(folder: Path, key: Path):
    sign(folder, key)
    with changing(folder) as step:  # a forger can do all that we can, but sign
        step.write("summary.json", b'{"ssim": 0.1}')
    assert problems(folder) == []
    with pytest.raises(UserError, match=r"manifest.json is not the one that was signed"):
        signed_by(folder, public(key))


def test_a_signature_that_was_taken_away_or_made_by_another_is_found(folder: Path, key: Path, tmp_path: Path):
    new_key(tmp_path / "theirs")
    sign(folder, tmp_path / "theirs")
    with pytest.raises(UserError, match="and not by the key"):
        signed_by(folder, public(key))
    (folder / "manifest.sig").unlink()
    with pytest.raises(UserError, match="is not signed"):
        signed_by(folder, public(key))


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"public_key": 3, "signature": ""}', '{"public_key": "00", "signature": "00"}']
)
def test_what_is_no_signature_is_refused(content: str, folder: Path):
    (folder / "manifest.sig").write_text(content)
    with pytest.raises(UserError, match=r"manifest.sig (is|holds)"):
        signed_by(folder)


def test_a_key_in_the_folder_or_that_others_can_read_is_refused(folder: Path, key: Path, tmp_path: Path):
    inside = folder / "mine"
    inside.write_bytes(key.read_bytes())
    with pytest.raises(UserError, match="keep it outside"):
        sign(folder, inside)
    inside.unlink()
    os.chmod(key, 0o640)
    with pytest.raises(UserError, match="mode 0640, must be readable by its owner only: chmod 600"):
        sign(folder, key)
    (tmp_path / "nonsense").touch(mode=0o600)
    for wrong, said in ((tmp_path / "nonsense", "is no private key"), (tmp_path / "nowhere", "no key at")):
        with pytest.raises(UserError, match=said):
            sign(folder, wrong)
    with pytest.raises(UserError, match="exists; a key is never written over"):
        new_key(key)


def test_a_damaged_folder_is_not_signed(folder: Path, key: Path):
    (folder / "summary.json").write_bytes(b"{}")
    with pytest.raises(UserError, match=r"so it is not signed: .*summary.json is not what manifest.json says"):
        sign(folder, key)


def test_the_commands_sign_verify_and_exit_with_3(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    key = tmp_path / "key"
    main(["sign", "--new-key", str(key)])
    main(["verify", str(folder)])
    assert "not signed: whoever can write there can have forged it" in capsys.readouterr().out
    main(["sign", str(folder), "--key", str(key)])
    main(["verify", str(folder), "--key", f"{key}.pub"])
    assert "every file is what manifest.json says; signed by " in capsys.readouterr().out
    (folder / "summary.json").write_bytes(b"forged")
    with pytest.raises(SystemExit) as stop:
        main(["verify", str(folder), "--key", f"{key}.pub"])
    assert stop.value.code == 3
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and "summary.json is not what manifest.json says" in err
    with pytest.raises(SystemExit) as stop:
        main(["sign", str(folder)])
    assert stop.value.code == 2
