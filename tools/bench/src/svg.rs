//! Charts as SVG.

use std::error::Error;

use plotters::coord::Shift;
use plotters::coord::ranged1d::{AsRangedCoord, Ranged, ValueFormatter};
use plotters::prelude::*;

use crate::record::{Axis, Chart};
use crate::report::thousands;

/// Width and height, pixels.
const SIZE: (u32, u32) = (960, 420);
/// Width without the legend at the right.
const PLOT: i32 = 660;
const FONT: &str = "sans-serif";

/// A chart, or a part of it that is being drawn.
type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;
type Drawn = Result<(), Box<dyn Error>>;

/// Draws the chart. Its first element is a title, which programs for blind readers use.
///
/// # Errors
///
/// A message that names the chart, if it is without points or the drawing fails.
pub fn draw(chart: &Chart) -> Result<String, String> {
    let mut text = String::new();
    drawn(chart, &mut text).map_err(|error| format!("cannot draw the chart {}: {error}", chart.file))?;
    Ok(titled(&text, chart))
}

/// Inserts title and description into the outer element.
fn titled(svg: &str, chart: &Chart) -> String {
    let Some((head, rest)) = svg.split_once('>') else { return svg.to_owned() };
    let names: Vec<&str> = chart.lines.iter().map(|line| line.name.as_str()).collect();
    let (title, y, x) = (escaped(&chart.title), escaped(&chart.y.label), escaped(&chart.x.label));
    let names = escaped(&names.join(", "));
    format!("{head} role=\"img\">\n<title>{title}</title>\n<desc>{y} over {x}: {names}</desc>{rest}")
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

fn drawn(chart: &Chart, text: &mut String) -> Drawn {
    let points = || chart.lines.iter().flat_map(|line| &line.points);
    let x = Bounds::of(points().map(|point| point.0), &chart.x).ok_or("it has no points")?;
    let y = Bounds::of(points().map(|point| point.1), &chart.y).ok_or("it has no points")?;
    let root = SVGBackend::with_string(text, SIZE).into_drawing_area();
    root.fill(&WHITE)?;
    let (plot, legend) = root.split_horizontally(PLOT);
    match (chart.x.logarithmic, chart.y.logarithmic) {
        (false, false) => lines(&plot, chart, x.linear(), y.linear())?,
        (false, true) => lines(&plot, chart, x.linear(), y.linear().log_scale())?,
        (true, false) => lines(&plot, chart, x.linear().log_scale(), y.linear())?,
        (true, true) => lines(&plot, chart, x.linear().log_scale(), y.linear().log_scale())?,
    }
    names(&legend, chart)?;
    root.present()?;
    Ok(())
}

/// The ends of an axis.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Bounds(f64, f64);

impl Bounds {
    /// Returns bounds around the values with some space above. A linear axis begins at zero. A logarithmic axis has no
    /// place for values of zero and below.
    fn of(values: impl Iterator<Item = f64>, axis: &Axis) -> Option<Self> {
        let is_shown = |value: &f64| value.is_finite() && (!axis.logarithmic || *value > 0.0);
        let mut values = values.filter(is_shown);
        let first = values.next()?;
        let (least, most) =
            values.fold((first, first), |(least, most), value| (least.min(value), most.max(value)));
        Some(if axis.logarithmic {
            Self(least * 0.8, most * 1.25)
        } else {
            Self(0.0, if most > 0.0 { most * 1.05 } else { 1.0 })
        })
    }

    fn linear(self) -> std::ops::Range<f64> {
        self.0..self.1
    }
}

fn lines<X, Y>(area: &Area<'_>, chart: &Chart, x: X, y: Y) -> Drawn
where
    X: AsRangedCoord<Value = f64>,
    Y: AsRangedCoord<Value = f64>,
    X::CoordDescType: Ranged<ValueType = f64> + ValueFormatter<f64>,
    Y::CoordDescType: Ranged<ValueType = f64> + ValueFormatter<f64>,
{
    let mut context = ChartBuilder::on(area)
        .caption(&chart.title, (FONT, 18))
        .margin(12)
        .x_label_area_size(44)
        .y_label_area_size(64)
        .build_cartesian_2d(x, y)?;
    context
        .configure_mesh()
        .x_desc(chart.x.label.as_str())
        .y_desc(chart.y.label.as_str())
        .x_label_formatter(&|value: &f64| number(*value))
        .y_label_formatter(&|value: &f64| number(*value))
        .draw()?;
    for (at, line) in chart.lines.iter().enumerate() {
        let shown =
            |(x, y): &&(f64, f64)| (!chart.x.logarithmic || *x > 0.0) && (!chart.y.logarithmic || *y > 0.0);
        let points: Vec<(f64, f64)> = line.points.iter().filter(shown).copied().collect();
        let style = Palette99::pick(at).stroke_width(2);
        // A distribution has many points, which would hide its line.
        if points.len() <= 20 {
            let dots = points.iter().map(|point| Circle::new(*point, 3, style.filled()));
            context.draw_series(dots)?;
        }
        context.draw_series(LineSeries::new(points, style))?;
    }
    Ok(())
}

/// Draws the names of the lines below each other.
fn names(area: &Area<'_>, chart: &Chart) -> Drawn {
    let mut y = 48;
    for (at, line) in chart.lines.iter().enumerate() {
        let style = Palette99::pick(at).stroke_width(3);
        area.draw(&PathElement::new(vec![(4, y), (26, y)], style))?;
        area.draw(&Text::new(line.name.clone(), (34, y - 7), (FONT, 13).into_font()))?;
        y += 22;
    }
    Ok(())
}

/// Formats a value of an axis.
fn number(value: f64) -> String {
    match value {
        value if value >= 1000.0 => thousands(value).replace(".00", "").replace(".0k", "k"),
        value if value >= 10.0 || value == 0.0 => format!("{value:.0}"),
        value => format!("{value}").chars().take(5).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::Line;

    fn chart(points: Vec<(f64, f64)>) -> Chart {
        Chart {
            file: "cycles".to_owned(),
            title: "Cycles & tasks".to_owned(),
            x: Axis::logarithmic("tasks"),
            y: Axis::linear("cycles/s"),
            lines: vec![Line { name: "ours".to_owned(), points }],
        }
    }

    #[test]
    fn a_chart_has_its_title_its_axes_and_the_names_of_its_lines() {
        let svg = draw(&chart(vec![(1.0, 10.0), (512.0, 4_000.0)])).unwrap();
        assert!(svg.starts_with("<svg") && svg.trim_end().ends_with("</svg>"), "{svg}");
        for text in
            ["<title>Cycles &amp; tasks</title>", "<desc>cycles/s over tasks: ours</desc>", "role=\"img\""]
        {
            assert!(svg.contains(text), "{text} is missing in {svg}");
        }
        assert_eq!(svg.matches("Cycles &amp; tasks").count(), 2, "a title for readers and one for programs");
        assert_eq!(svg, draw(&chart(vec![(1.0, 10.0), (512.0, 4_000.0)])).unwrap());
    }

    #[test]
    fn a_chart_without_points_is_an_error_that_names_it() {
        assert!(draw(&chart(Vec::new())).is_err_and(|error| error.contains("cycles")));
    }

    #[test]
    fn a_linear_axis_begins_at_zero_and_a_logarithmic_one_leaves_zero_out() {
        let values = || [0.0, 100.0, 10.0].into_iter();
        assert_eq!(Bounds::of(values(), &Axis::linear("")), Some(Bounds(0.0, 105.0)));
        assert_eq!(Bounds::of(values(), &Axis::logarithmic("")), Some(Bounds(8.0, 125.0)));
        assert_eq!(Bounds::of([0.0].into_iter(), &Axis::logarithmic("")), None);
    }

    #[test]
    fn values_of_axes_are_short() {
        let shown = [0.0, 0.5, 20.0, 1_000.0, 20_000.0, 400_000.0].map(number);
        assert_eq!(shown, ["0", "0.5", "20", "1k", "20k", "400k"]);
    }
}
