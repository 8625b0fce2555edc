//! Who measured what: runs and the libraries beside them, as named lines of a chart.

use super::input::{Arguments, Places, Run, Timing};

/// What is compared: one collective, element type and place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Topic {
    pub(super) collective: String,
    pub(super) norm: Option<String>,
    pub(super) dtype: String,
    pub(super) in_place: bool,
}

impl Topic {
    pub(super) fn title(&self) -> String {
        let place = if self.in_place { "in place" } else { "out of place" };
        let norm = self.norm.as_ref().map_or_else(String::new, |norm| format!(" with {norm}"));
        format!("{}{norm}, {}, {place}", self.collective, self.dtype)
    }
}

/// One line.
#[derive(Debug)]
pub(super) struct Series {
    pub(super) name: String,
    /// Signal's own, to which others are compared.
    pub(super) is_own: bool,
    /// By size.
    pub(super) points: Vec<Point>,
}

#[derive(Clone, Debug)]
pub(super) struct Point {
    pub(super) bytes: u64,
    pub(super) algorithm: String,
    pub(super) timing: Timing,
}

impl Series {
    pub(super) fn at(&self, bytes: u64) -> Option<&Point> {
        self.points.iter().find(|point| point.bytes == bytes)
    }
}

/// All topics in the order in which the runs have them, each with its lines.
pub(super) fn topics(runs: &[Run]) -> Vec<(Topic, Vec<Series>)> {
    let mut topics: Vec<Topic> = Vec::new();
    for run in runs {
        for in_place in [false, true] {
            let topic = topic(&run.arguments, in_place);
            if !topics.contains(&topic) && run.rows.iter().any(|row| of(&row.places, in_place).is_some()) {
                topics.push(topic);
            }
        }
    }
    topics.into_iter().map(|topic| (topic.clone(), series(runs, &topic))).collect()
}

fn topic(arguments: &Arguments, in_place: bool) -> Topic {
    let Arguments { collective, norm, dtype, .. } = arguments;
    Topic { collective: collective.clone(), norm: norm.clone(), dtype: dtype.clone(), in_place }
}

fn of(places: &Places, in_place: bool) -> Option<&Timing> {
    let timing = if in_place { &places.in_place } else { &places.out_of_place };
    timing.as_ref()
}

fn series(runs: &[Run], topic: &Topic) -> Vec<Series> {
    let runs: Vec<&Run> = runs.iter().filter(|run| self::topic(&run.arguments, topic.in_place) == *topic).collect();
    let mut all = Vec::new();
    for (run, suffix) in runs.iter().zip(differences(&runs)) {
        let named = |name: &str| if suffix.is_empty() { name.to_owned() } else { format!("{name}, {suffix}") };
        let points = run.rows.iter().filter_map(|row| {
            let timing = of(&row.places, topic.in_place).filter(|timing| timing.is_positive())?.clone();
            Some(Point { bytes: row.bytes, algorithm: row.algorithm.clone(), timing })
        });
        all.push(Series { name: named("Signal"), is_own: true, points: points.collect() });
        let mut names: Vec<String> = Vec::new();
        for contender in run.rows.iter().flat_map(|row| &row.contenders) {
            let name = format!("{} {}", contender.name, contender.version).trim().to_owned();
            if !names.contains(&name) {
                names.push(name);
            }
        }
        for name in names {
            let points = run.rows.iter().filter_map(|row| {
                let found =
                    row.contenders.iter().find(|other| format!("{} {}", other.name, other.version).trim() == name)?;
                let timing = of(&found.places, topic.in_place).filter(|timing| timing.is_positive())?.clone();
                Some(Point { bytes: row.bytes, algorithm: String::new(), timing })
            });
            let points: Vec<Point> = points.collect();
            if !points.is_empty() {
                all.push(Series { name: named(&name), is_own: false, points });
            }
        }
    }
    all
}

/// What tells each run from the others; nothing where there is one. At last the file's name, so that no two are called the same.
fn differences(runs: &[&Run]) -> Vec<String> {
    let traits: [fn(&Run) -> String; 7] = [
        |run| run.arguments.backend.clone(),
        |run| format!("{} ranks", run.arguments.ranks),
        |run| if run.arguments.processes { "processes".to_owned() } else { "one process".to_owned() },
        |run| run.arguments.algo.clone(),
        |run| run.arguments.graph.map_or_else(|| "eager".to_owned(), |calls| format!("graphs of {calls}")),
        |run| format!("{} memory", run.arguments.memory),
        |run| format!("{} buffers", run.arguments.buffers),
    ];
    let differing = |of: &&fn(&Run) -> String| runs.iter().any(|run| of(run) != of(runs[0]));
    let chosen: Vec<_> = traits.iter().filter(differing).collect();
    let mut names: Vec<String> =
        runs.iter().map(|run| chosen.iter().map(|of| of(run)).collect::<Vec<_>>().join(", ")).collect();
    for at in 0..names.len() {
        let same: Vec<usize> = (0..names.len()).filter(|other| names[*other] == names[at]).collect();
        if same.len() > 1 {
            for (number, other) in same.into_iter().enumerate() {
                let stem = runs[other].stem();
                let twice = runs.iter().filter(|run| run.stem() == stem).count() > 1;
                let stem = if twice { format!("{stem} ({})", number + 1) } else { stem };
                names[other] = if names[other].is_empty() { stem } else { format!("{}, {stem}", names[other]) };
            }
        }
    }
    names
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// A run as the bench writes it; `change` is `FROM=>TO`.
    pub(crate) fn run(path: &str, change: &str, contenders: &str) -> Run {
        let timing = |us: f64, wrong: u64| {
            format!(
                r#"{{"time_us":{us},"min_us":{us},"p99_us":{us},"batches":3,"calls_per_batch":9,"algbw_gb_s":1.5,"busbw_gb_s":2.5,"wrong":{wrong},"max_error":null}}"#
            )
        };
        let row = |bytes: u64, us: f64| {
            let timing = timing(us, 0);
            format!(
                r#"{{"bytes":{bytes},"count":9,"dtype":"f32","algorithm":"lamport","out_of_place":{timing},"in_place":null,"contenders":[{contenders}]}}"#
            )
        };
        let text = format!(
            r#"{{"machine":{{"signal_version":"0.1.0","os":"linux","arch":"x86_64","cpus":2}},"devices":[{{"name":"A <GPU>","arch":"sm_90"}}],
            "arguments":{{"collective":"all-reduce","backend":"cuda","ranks":2,"dtype":"f32","algo":"auto","graph":50,"memory":"symmetric","buffers":"same"}},
            "rows":[{},{}],"error":null,"of_a_later_version":1}}"#,
            row(1024, 1.5),
            row(4096, 2.0)
        );
        let text = change.split_once("=>").map_or(text.clone(), |(from, to)| text.replace(from, to));
        let mut run: Run = serde_json::from_str(&text).unwrap();
        run.path = path.into();
        run
    }

    pub(crate) const NCCL: &str = r#"{"name":"nccl","version":"2.28.9","out_of_place":{"time_us":6,"min_us":5,"p99_us":7,"algbw_gb_s":1,"busbw_gb_s":1,"wrong":0},"in_place":null,"refusal":null}"#;

    fn names(runs: &[Run]) -> Vec<String> {
        let topics = topics(runs);
        assert_eq!(topics.len(), 1, "{topics:?}");
        topics[0].1.iter().map(|series| series.name.clone()).collect()
    }

    #[test]
    fn runs_are_told_apart_by_what_differs() {
        assert_eq!(names(&[run("a.json", "", "")]), ["Signal"]);
        assert_eq!(names(&[run("a.json", "", NCCL)]), ["Signal", "nccl 2.28.9"]);
        let eager = run("b.json", "\"graph\":50=>\"graph\":null", "");
        assert_eq!(names(&[run("a.json", "", ""), eager]), ["Signal, graphs of 50", "Signal, eager"]);
        assert_eq!(names(&[run("x/a.json", "", ""), run("b.json", "", "")]), ["Signal, a", "Signal, b"]);
        let twice = [run("x/a.json", "", ""), run("y/a.json", "", "")];
        assert_eq!(names(&twice), ["Signal, a (1)", "Signal, a (2)"]);
    }

    #[test]
    fn topics_are_of_one_collective_type_and_place() {
        let other = run("b.json", "all-reduce=>all-gather", "");
        let both = topics(&[run("a.json", "", ""), other]);
        let titles: Vec<String> = both.iter().map(|(topic, _)| topic.title()).collect();
        assert_eq!(titles, ["all-reduce, f32, out of place", "all-gather, f32, out of place"]);
        assert_eq!(both[0].1[0].at(4096).unwrap().timing.time_us, 2.0);
    }
}
