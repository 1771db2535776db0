from dataclasses import replace

import pytest
from summaries import attack_result, summary, worst_of

from splitveil.evaluation.evaluate import wilson
from splitveil.evaluation.summary import EdgeAlone, Part, RaisedFlag, Summary
from splitveil.metrics.cost import Cost, Latency
from splitveil.report.terminal import cells, print_table


def run(**attacks: tuple[float, float, float]) -> Summary:
    rows = [attack_result(name, mse, ssim=ssim, psnr=psnr) for name, (mse, ssim, psnr) in attacks.items()]
    return summary("a[b]", *rows, n_test=50, ceiling_mse=0.05, flags=(RaisedFlag("metric-ceiling", "why"),))


def test_a_row_holds_the_numbers_of_one_attack_the_strongest() -> None:
    seen = run(ridge=(0.02, 0.7, 17.0), decoder=(0.01, 0.6, 20.0), broken=(float("nan"), 0.99, 99.0))
    assert seen.strongest is seen.attacks["decoder"]
    assert cells(seen)[3:6] == ["decoder", "0.0100", "0.600"]


def test_the_table_fits_eighty_columns_and_shows_names_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    print_table([run(ridge=(0.02, 0.7, 17.0), decoder=(0.01, 0.6, 20.0)), run(), replace(run(), accuracy=float("nan"))])
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    assert "…" not in out
    words = [line.split() for line in out.splitlines() if line.startswith(" a[b]")]
    assert words[0] == ["a[b]", "exposed", "0.900", "decoder", "0.0100", "0.600", "∞"]
    assert words[1] == ["a[b]", "not", "established", "0.900", "none", "run", "∞"]
    assert words[2][3] == "–"
    assert "accuracy a[b]: 0.900 (95 %: 0.850 to 0.940)" in out
    assert "flag a[b]: metric-ceiling (why)" in out


def test_the_verdict_on_each_run_comes_first(capsys: pytest.CaptureFixture[str]) -> None:
    print_table([run(decoder=(0.01, 0.6, 20.0)), run()])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("exposed a[b]: A listener gets the images")
    assert lines[1].startswith("not established a[b]: What a listener gets is not established: no attack")


def test_an_interval_is_printed_from_low_to_high_and_stays_below_one(capsys: pytest.CaptureFixture[str]) -> None:
    print_table([replace(run(decoder=(0.02, 0.7, 17.0)), name="gaussian+cem", accuracy=1.0, accuracy_ci95=wilson(18, 18))])
    out = capsys.readouterr().out
    assert "1.000 (95 %: 0.824 to 1.000)" in out
    assert max(map(len, out.splitlines())) <= 80


def test_the_worst_case_stands_below_and_several_seeds_have_one_more_line(capsys: pytest.CaptureFixture[str]) -> None:
    first = replace(run(ridge=(0.02, 0.7, 17.0)), worst_case=worst_of(mse=0.008, ssim=0.75, psnr=21.0))
    seeds = [replace(first, name=f"a-seed{i}-strength4", seed=i, weights_sha256=str(i)) for i in (0, 1)]
    print_table([*seeds, run(), replace(run(), skipped={"mask": "why [not]"})])
    out = " ".join(capsys.readouterr().out.split())
    assert "worst case a-seed1-strength4, each image by its best attack: MSE 0.0080 (95 %: 0.0070 to 0.0090), SSIM 0.750" in out
    assert "unluckiest 5 %: MSE below 0.0020, SSIM above 0.900" in out
    assert "worst case a-strength4 over 2 seeds: MSE 0.0080 (95 %: 0.0080 to 0.0080)" in out
    assert out.count("worst case") == 3
    assert "a[b]: mask skipped, why [not]" in out


def test_runs_that_do_not_compare_get_tables_of_their_own_with_the_reason(capsys: pytest.CaptureFixture[str]) -> None:
    first = replace(run(ridge=(0.02, 0.7, 17.0)), name="first", n_test=1000, incomplete=("gan", "fora"), suite="standard")
    other = replace(first, name="other", n_test=50, splits={"test": Part(50, "test2")}, incomplete=())
    print_table([first, other, replace(first, name="third", incomplete=())])
    out = " ".join(capsys.readouterr().out.split())
    places = [out.index(words) for words in ("1000 test images", "third exposed 0.900", "50 test images", "other exposed 0.900")]
    assert places == sorted(places)
    assert "other does not compare with first: other test images (50 images, sha256 test2, not 1000" in out
    assert "first: suite standard is incomplete, without a number: gan, fora" in out


def test_what_the_edge_costs_and_reaches_alone_stands_below_and_where_the_cloud_adds_nothing_it_says_so(
    capsys: pytest.CaptureFixture[str],
) -> None:
    costs = {"edge": Cost(7160, 1_474_560, 2048), "cloud": Cost(10, 10, 2048)}
    timed = replace(run(ridge=(0.02, 0.7, 17.0)), name="deep", cost=costs, latency=Latency(0.1234, 1, "a CPU"))
    alone = replace(timed, name="alone", edge_alone=EdgeAlone(0.86, 100, 50))
    unknown = {half: Cost(None, None, 64) for half in costs}
    print_table([timed, alone, replace(alone, name="box", cost=unknown, latency=None, edge_alone=EdgeAlone(0.5, 100, 50)), run()])
    out = " ".join(capsys.readouterr().out.split())
    assert "edge deep: 1.47 M multiply-adds, 7,160 weights, 2,048 bytes sent, 0.123 ms (a CPU, threads: 1) " in out
    assert "0.123 ms (a CPU, threads: 1), accuracy 0.860 without the cloud: the cloud adds nothing, the model could run on" in out
    assert "edge box: 64 bytes sent, accuracy 0.500 without the cloud " in out + " "
    assert out.count("edge ") == 3 and out.count("adds nothing") == 1
