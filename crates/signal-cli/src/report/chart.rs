//! Log-log charts as SVG. Each line has a colour, a dash and a mark of its own, so that no colour has to be seen to tell them apart.

use std::ops::Range;

use plotters::coord::Shift;
use plotters::element::{Drawable, PointCollection};
use plotters::prelude::*;

use super::series::{Point, Series};
use crate::error::{CliError, Result};
use crate::machine::binary_size;

const SIZE: (u32, u32) = (880, 470);
/// Of Okabe and Ito, for all kinds of sight, without their yellow, which white drowns.
const COLOURS: [RGBColor; 7] = [
    RGBColor(0, 114, 178),
    RGBColor(213, 94, 0),
    RGBColor(0, 158, 115),
    RGBColor(204, 121, 167),
    RGBColor(86, 180, 233),
    RGBColor(230, 159, 0),
    RGBColor(0, 0, 0),
];
const LIMIT: RGBColor = RGBColor(110, 110, 110);

/// What is drawn of each point.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Quantity {
    Latency,
    BusBandwidth,
}

/// What the machine cannot beat, as the user has told.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Limits {
    pub(super) link_gb_s: Option<f64>,
    pub(super) floor_us: Option<f64>,
}

/// A limit's value at a size.
type Bound = Box<dyn Fn(f64) -> f64>;

impl Quantity {
    fn of(self, point: &Point) -> f64 {
        match self {
            Quantity::Latency => point.timing.time_us,
            Quantity::BusBandwidth => point.timing.busbw_gb_s,
        }
    }

    pub(super) fn name(self) -> &'static str {
        match self {
            Quantity::Latency => "Time of a call, us (median, slowest rank)",
            Quantity::BusBandwidth => "Bus bandwidth, GB/s",
        }
    }

    /// Lines of the limits: name, and value at a size. `factor`: bytes on a link for each byte of a call.
    fn limits(self, limits: Limits, factor: f64) -> Vec<(String, Bound)> {
        let mut all: Vec<(String, Bound)> = Vec::new();
        if let Some(rate) = limits.link_gb_s {
            let name = format!("link, {rate} GB/s");
            all.push(match self {
                Quantity::Latency => (name, Box::new(move |bytes| bytes * factor / rate / 1e3)),
                Quantity::BusBandwidth => (name, Box::new(move |_| rate)),
            });
        }
        if let Some(floor) = limits.floor_us {
            let name = format!("floor, {floor} us");
            all.push(match self {
                Quantity::Latency => (name, Box::new(move |_| floor)),
                Quantity::BusBandwidth => (name, Box::new(move |bytes| bytes * factor / floor / 1e3)),
            });
        }
        all
    }
}

/// A chart of one quantity. `title` is what a screen reader says of it.
pub(super) fn draw(title: &str, quantity: Quantity, series: &[Series], limits: Limits) -> Result<String> {
    let failed = |why: String| CliError::Arguments(format!("the chart of {title}: {why}"));
    let mut svg = String::new();
    {
        let area = SVGBackend::with_string(&mut svg, SIZE).into_drawing_area();
        draw_on(&area, quantity, series, limits).map_err(|why| failed(why.to_string()))?;
        area.present().map_err(|why| failed(why.to_string()))?;
    }
    let named = format!("<svg role=\"img\" aria-label=\"{}\" ", super::page::escape(title));
    Ok(svg.replacen("<svg ", &named, 1))
}

type Drawn = std::result::Result<(), Box<dyn std::error::Error>>;

fn draw_on(area: &DrawingArea<SVGBackend<'_>, Shift>, quantity: Quantity, series: &[Series], limits: Limits) -> Drawn {
    area.fill(&WHITE)?;
    let points = || series.iter().flat_map(|series| &series.points);
    let sizes = range(points().map(|point| point.bytes as f64), 2.0);
    let values = range(points().map(|point| quantity.of(point)), 10.0);
    // Of the same collective and world, so of any point.
    let factor = points().next().map_or(1.0, |point| point.timing.busbw_gb_s / point.timing.algbw_gb_s);
    let mut chart = ChartBuilder::on(area)
        .margin(14)
        .x_label_area_size(46)
        .y_label_area_size(64)
        .build_cartesian_2d((sizes.clone()).log_scale().base(2.0), values.clone().log_scale())?;
    chart
        .configure_mesh()
        .x_desc("Size of the call")
        .y_desc(quantity.name())
        .x_labels(14)
        .x_label_formatter(&|bytes| binary_size(bytes.round() as u64))
        .y_label_formatter(&|value| plain(*value))
        .light_line_style(RGBColor(238, 238, 238))
        .bold_line_style(RGBColor(215, 215, 215))
        .label_style(("sans-serif", 13))
        .axis_desc_style(("sans-serif", 14))
        .draw()?;

    for (number, (name, value)) in quantity.limits(limits, factor).into_iter().enumerate() {
        let steps = 64;
        let ratio = (sizes.end / sizes.start).powf(1.0 / f64::from(steps));
        let at = (0..=steps).map(|step| sizes.start * ratio.powi(step)).map(|bytes| (bytes, value(bytes)));
        let line = at.filter(|(_, value)| values.contains(value));
        chart
            .draw_series(DashedLineSeries::new(line, [6, 2][number % 2], 4, LIMIT.stroke_width(1)))?
            .label(name)
            .legend(|(x, y)| PathElement::new([(x, y), (x + 28, y)], LIMIT.stroke_width(1)));
    }
    for (number, line) in series.iter().enumerate() {
        let colour = COLOURS[number % COLOURS.len()];
        let style = colour.stroke_width(2);
        let at: Vec<(f64, f64)> = line.points.iter().map(|point| (point.bytes as f64, quantity.of(point))).collect();
        let anno = if number == 0 {
            chart.draw_series(LineSeries::new(at.iter().copied(), style))?
        } else {
            let dash = 3 + 3 * (number as u32 % 4);
            chart.draw_series(DashedLineSeries::new(at.iter().copied(), dash, 4, style))?
        };
        anno.label(line.name.clone()).legend(move |(x, y)| mark((x + 14, y), number, colour));
        chart.draw_series(at.iter().map(|at| mark(*at, number, colour)))?;
    }
    chart
        .configure_series_labels()
        .position(if quantity == Quantity::Latency {
            SeriesLabelPosition::UpperLeft
        } else {
            SeriesLabelPosition::LowerRight
        })
        .margin(12)
        .legend_area_size(36)
        .label_font(("sans-serif", 14))
        .background_style(WHITE.mix(0.85))
        .border_style(RGBColor(200, 200, 200))
        .draw()?;
    Ok(())
}

/// The mark of a line, by its number.
fn mark<DB: DrawingBackend, C: Clone + 'static>(at: C, number: usize, colour: RGBColor) -> DynElement<'static, DB, C>
where
    Circle<C, i32>: Drawable<DB>,
    TriangleMarker<C, i32>: Drawable<DB>,
    Cross<C, i32>: Drawable<DB>,
    for<'b> &'b Circle<C, i32>: PointCollection<'b, C>,
    for<'b> &'b TriangleMarker<C, i32>: PointCollection<'b, C>,
    for<'b> &'b Cross<C, i32>: PointCollection<'b, C>,
{
    match number % 4 {
        0 => Circle::new(at, 4, colour.filled()).into_dyn(),
        1 => TriangleMarker::new(at, 6, colour.filled()).into_dyn(),
        2 => Cross::new(at, 5, colour.stroke_width(2)).into_dyn(),
        _ => Circle::new(at, 5, colour.stroke_width(2)).into_dyn(),
    }
}

/// From below the least to above the largest, to powers of `base`.
fn range(values: impl Iterator<Item = f64>, base: f64) -> Range<f64> {
    let (least, most) =
        values.fold((f64::INFINITY, 0.0f64), |(least, most), value| (least.min(value), most.max(value)));
    if most <= 0.0 {
        return 1.0..base;
    }
    let (low, high) = (base.powf(least.log(base).floor()), base.powf(most.log(base).ceil()));
    if low < high { low..high } else { low / base..high * base }
}

/// A number of the axis.
fn plain(value: f64) -> String {
    if value >= 1.0 { format!("{}", value.round()) } else { format!("{value:.3}").trim_end_matches('0').to_owned() }
}
