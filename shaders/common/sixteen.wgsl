// 16 consecutive columns of a row.
struct Sixteen {
    a: vec4<f32>,
    b: vec4<f32>,
    c: vec4<f32>,
    d: vec4<f32>,
}
