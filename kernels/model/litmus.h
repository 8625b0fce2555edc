// Tests of the model's memory itself.
#pragma once

namespace model {

bool run_litmus();  // whether each program shows all that it should, and nothing else

}  // namespace model
